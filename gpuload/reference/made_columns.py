"""What a reference may make of rows in addition to ids: of images, references to them."""

from typing import Any, Protocol


class MadeColumns(Protocol):
    """Columns that a load makes together with ids, and that are cached with them."""

    def problem(self) -> str | None:
        """Why nothing identifies them; None if something does."""

    def decides(self) -> list[Any]:
        """What ids depend on, apart from the file, the tokenizer and the template."""

    def reads(self, source: Any) -> list[str]:
        """The columns of a source that they are made of, apart from the prompts."""

    def of(self, table: Any, prompts: Any) -> tuple[Any, str | None]:
        """Those of some rows, with a column `cache.entry.HIDDEN`; and why no cache may keep them, if it may not."""

    def holds(self, source: Any, columns: Any) -> bool:
        """Whether these columns (`cache.column_file.ColumnFile`) of an earlier load would be made again."""
