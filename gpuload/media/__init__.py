"""Images of prompts: their sizes, and what a processor makes of sizes."""
