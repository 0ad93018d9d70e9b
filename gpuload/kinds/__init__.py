"""What a row is: prompts, chats with loss masks, pairs."""
