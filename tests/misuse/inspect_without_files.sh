# No files.
gpuload inspect --tokenizer tokenizer
# exit 2: gpuload inspect: error: no files given
