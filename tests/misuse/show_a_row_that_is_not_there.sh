# A row that is not there.
gpuload show chats.jsonl --row 1000
# exit 1: gpuload: --row 1000: there are 4 rows, so pass a number from -4 to 3
