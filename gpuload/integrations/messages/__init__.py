"""Conversations that a trainer tokenizes in pieces: each message alone, or each beginning of a conversation.

    templates.py    pieces → texts → ids, each piece with the chat template and the arguments that it needs
    turns.py        the turns of conversations as pieces
    rows.py         how ids of pieces become rows, and rows that the trainer's own function has to prepare
    cache.py        rows of an earlier start, found instead of made

What differs from trainer to trainer are its pieces and its rule: how their ids, or texts, become one row. Each rule is
a function of the trainer's package here, which says which function of the trainer it follows.
"""
