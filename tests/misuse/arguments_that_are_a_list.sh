# Constants of a template without names.
gpuload check chats.jsonl --tokenizer tokenizer --template-kwargs '[1]'
# exit 1: gpuload: --template-kwargs '[1]': expected a JSON object, such as {"enable_thinking": false}
