"""Predicates over Arrow types: text, lists and conversations in any of their encodings."""

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are text: string, large_string, string_view, or a dictionary of those."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists with 32-bit (list) or 64-bit (large_list) offsets."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_messages(kind: pa.DataType) -> bool:
    """Whether values of this type can be conversations: lists of structs."""
    return is_list(kind) and bool(pa.types.is_struct(kind.value_type))
