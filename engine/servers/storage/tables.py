"""Tables whose rows belong to tenants, and stores that consist of such tables.

A row is an object of a dataclass. Its columns have the names of the fields, and rows have the order
in which they were added. Every method of a store that changes or reads tables is one transaction.
So a process may be killed at any time, and the next one finds each change whole or not at all.
"""

import functools
import sqlite3
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

from engine.core.errors import NotFoundError, RateLimitError
from engine.servers.http.listing import Order
from engine.servers.storage.database import Database

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Db: TypeAlias = sqlite3.Connection  # of a transaction
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Store")
Row = TypeVar("Row", bound="DataclassInstance")


class Store:
    """Objects of one kind in a database."""

    def __init__(self, database: Database) -> None:
        self.database = database


def transaction(
    work: Callable[Concatenate[S, Db, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Makes a method of a store a coroutine that runs as one transaction, in the database's
    thread. The method takes the connection as its first argument, and callers do not pass it.
    """

    @functools.wraps(work)
    async def run(store: S, /, *args: P.args, **named: P.kwargs) -> T:
        return await store.database.run(lambda db: work(store, db, *args, **named))

    return run


class Table(Generic[Row]):
    """A table with the columns `id`, `owner`, those of `row`, and `seq` if it is listed by pages.
    `noun`, `param` and `code` are for the error of an id that is not there. `is_open` is the SQL
    condition for rows that have not ended. `derived` has the fields that are not stored, each with
    its SQL expression.
    """

    def __init__(
        self,
        name: str,
        row: type[Row],
        *,
        noun: str,
        param: str,
        code: str | None = None,
        is_open: str = "FALSE",
        derived: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._row = row
        self._noun, self._param, self._code = noun, param, code
        self.is_open = is_open
        sources = {each.name: each.name for each in fields(row)} | dict(derived or {})
        self._columns = ", ".join(f"{source} AS {name}" for name, source in sources.items())
        self._stored = [name for name, source in sources.items() if name == source]

    def find(
        self,
        db: Db,
        row_id: str,
        owner: str | None = None,
        where: str = "TRUE",
        values: Sequence[Any] = (),
    ) -> Row:
        """The row with this id for which `where` holds. If `owner` is given, only a row of this
        owner is found.
        """
        condition = f"id = ? AND owner = COALESCE(?, owner) AND ({where})"
        found = self.rows(db, condition, (row_id, owner, *values))
        if not found:
            raise NotFoundError(
                f"There is no such {self._noun}.", param=self._param, code=self._code
            )
        return found[0]

    def rows(self, db: Db, where: str, values: Sequence[Any] = ()) -> list[Row]:
        """All rows for which `where` holds, the oldest first."""
        query = f"SELECT {self._columns} FROM {self._name} WHERE {where} ORDER BY rowid"
        return [self._row(**dict(each)) for each in db.execute(query, values)]

    def page(
        self,
        db: Db,
        owner: str,
        limit: int,
        where: str = "TRUE",
        values: Sequence[Any] = (),
        *,
        order: Order = "desc",
        after: str | None = None,
        before: str | None = None,
    ) -> list[Row]:
        """A page of the owner's rows for which `where` holds. `after` and `before` are ids."""
        query = f"SELECT {self._columns} FROM {self._name} WHERE owner = ? AND ({where})"
        cursors = [None if each is None else self._position(db, each) for each in (after, before)]
        found = page_of(db, query, (owner, *values), limit, order, *cursors)
        return [self._row(**dict(each)) for each in found]

    def _position(self, db: Db, row_id: str) -> int:
        query = f"SELECT rowid FROM {self._name} WHERE id = ?"
        return int(db.execute(query, (row_id,)).fetchone()[0])

    def insert(self, db: Db, row: Row, **more: Any) -> None:
        """Add a row. `more` has columns that are not fields."""
        self.add(db, {name: getattr(row, name) for name in self._stored} | more)

    def add(self, db: Db, columns: Mapping[str, Any]) -> None:
        marks = ", ".join("?" * len(columns))
        query = f"INSERT INTO {self._name} ({', '.join(columns)}) VALUES ({marks})"
        db.execute(query, tuple(columns.values()))

    def update(self, db: Db, row_id: str, where: str = "TRUE", **columns: Any) -> bool:
        """Change columns of a row, if `where` holds. Returns whether it did."""
        changes = ", ".join(f"{name} = ?" for name in columns)
        query = f"UPDATE {self._name} SET {changes} WHERE id = ? AND ({where})"
        return db.execute(query, (*columns.values(), row_id)).rowcount > 0

    def delete(self, db: Db, where: str, values: Sequence[Any] = ()) -> list[str]:
        """Delete the rows for which `where` holds. Returns their ids."""
        query = f"DELETE FROM {self._name} WHERE {where} RETURNING id"
        return [each["id"] for each in db.execute(query, values).fetchall()]

    def drop_oldest(self, db: Db, owner: str, most: int, values: Sequence[Any] = ()) -> list[str]:
        """Keep `most` rows of the owner that have ended, and delete older ones. Returns the ids of
        deleted rows. `values` are those of the condition for open rows.
        """
        oldest = (
            f"rowid IN (SELECT rowid FROM {self._name} WHERE owner = ? AND NOT ({self.is_open})"
            " ORDER BY rowid DESC LIMIT -1 OFFSET ?)"
        )
        return self.delete(db, oldest, (owner, *values, most))

    def count(self, db: Db, owner: str, where: str = "TRUE", values: Sequence[Any] = ()) -> int:
        query = f"SELECT COUNT(*) FROM {self._name} WHERE owner = ? AND ({where})"
        return int(db.execute(query, (owner, *values)).fetchone()[0])

    def check_open(
        self,
        db: Db,
        owner: str,
        most: int,
        words: str,
        retry_after: float,
        values: Sequence[Any] = (),
    ) -> None:
        """Raise if `most` rows of the owner have not ended. `words` says what they are."""
        if self.count(db, owner, self.is_open, values) >= most:
            raise RateLimitError(
                f"{most} of your {words}, which is as many as a tenant may have. Let some end, or"
                " cancel some.",
                retry_after=retry_after,
            )


def page_of(
    db: Db,
    query: str,
    values: Sequence[Any],
    limit: int,
    order: Order,
    after: int | None = None,
    before: int | None = None,
) -> list[sqlite3.Row]:
    """A page of the rows of `query`, in the order of their `seq`: up to `limit` that follow the row
    `after`, or that come just before the row `before`, or else the first ones.
    """
    is_rising = (order == "asc") == (before is None)
    compare, direction = (">", "ASC") if is_rising else ("<", "DESC")
    cursor = after if before is None else before
    if cursor is not None:
        query += f" AND seq {compare} ?"
        values = (*values, cursor)
    found = db.execute(f"{query} ORDER BY seq {direction} LIMIT ?", (*values, limit)).fetchall()
    return found if before is None else found[::-1]


def having(pairs: Mapping[str, str]) -> tuple[str, list[str]]:
    """The SQL condition that a row's metadata, which is JSON text, has these pairs; its values."""
    condition = " AND EXISTS (SELECT 1 FROM json_each(metadata) WHERE key = ? AND value = ?)"
    return "TRUE" + condition * len(pairs), [each for pair in pairs.items() for each in pair]
