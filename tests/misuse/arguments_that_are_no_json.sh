# Arguments of the template that are no JSON.
gpuload check chats.jsonl --tokenizer tokenizer --template-kwargs enable_thinking=false
# exit 1: gpuload: --template-kwargs 'enable_thinking=false': not valid JSON: Expecting value: line 1 column 1 (char
# 0)
