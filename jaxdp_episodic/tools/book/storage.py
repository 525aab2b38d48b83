"""A book's table of numbered rows, in an SQLite file or a database of SQLAlchemy.

A transaction reads all rows, and adds at most one. Row numbers are the primary key, so
of two transactions that add the same one fails, at any isolation level.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxdp_episodic._validation import one_line
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.atomic import owner_only
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.files.sqlite_file import connect, refusing

TABLE = "jaxdp_episodic_book"
# The only statement in the schema of an SQLite book, the same in every version.
_SCHEMA = (
    f"CREATE TABLE {TABLE} (number INTEGER PRIMARY KEY, "
    "record TEXT NOT NULL, hash TEXT NOT NULL)"
)
_SIZE = f"SELECT total(length(CAST(record AS BLOB))) FROM {TABLE}"
# Databases that list their triggers in the standard's table, and the query for it.
_WITH_TRIGGERS = ("postgresql", "mysql", "mariadb")
_TRIGGERS = (
    "SELECT count(*) FROM information_schema.triggers WHERE event_object_table = :name"
)
_PATIENCE_S = 60.0  # seconds that a process waits for others
_CONNECT_S = 20  # seconds that a process waits for PostgreSQL's answer
# Seconds between the first tries to write; they grow by half each time, up to a second.
_PAUSE_S = 0.01
_MOST_READ = 2**28  # bytes of all records of an SQLite file
_MOST_BYTES = 2**26  # bytes of a record: MySQL has several types of text
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+_.-]*)://")  # beginning of a URL
# SQLSTATE classes: a transaction was rolled back for another, a key is a duplicate.
_LOST = ("40", "23")

Result = TypeVar("Result")


class BookError(ValueError):
    """There is no book, it is damaged, or its version is unknown."""


class Row(NamedTuple):
    """One record of a book as stored."""

    number: int
    record: str
    hash: str


class Rows:
    """The rows of a book, within a transaction."""

    def __init__(self, connection: Any, table: Any) -> None:
        self._connection, self._table = connection, table

    def read(self, first: int = 0) -> list[Row]:
        """Returns the rows with numbers from ``first`` on, in order."""
        number = self._table.c.number
        query = self._table.select().where(number >= first).order_by(number)
        return [Row(*row) for row in self._connection.execute(query)]

    def append(self, row: Row) -> Row:
        """Adds and returns a row, if nothing like a trigger or a rule drops it."""
        self._connection.execute(self._table.insert().values(**row._asdict()))
        if self.read(row.number) != [row]:
            raise BookError(
                f"record {row.number} is not there after it was written: something in "
                "the database, like a trigger or a rule, drops or changes it. Nothing "
                "was charged"
            )
        return row


class Storage:
    """Where one book is stored: a path or a URL. Nothing is opened until it is used."""

    def __init__(self, where: str) -> None:
        scheme, self._shown = _SCHEME.match(where), shown(where)
        self._path = None if scheme else Path(where)
        if scheme and scheme[1].partition("+")[0] == "sqlite":
            raise ValueError(
                "book must be a path or a URL; give an SQLite file by its path"
            )
        self._alchemy = alchemy = require("sqlalchemy", purpose="a book", extra=None)
        long = alchemy.Text(_MOST_BYTES)
        text = alchemy.Text().with_variant(long, "mysql", "mariadb")
        whole = {"primary_key": True, "autoincrement": False}
        self._table = alchemy.Table(
            TABLE,
            alchemy.MetaData(),
            alchemy.Column("number", alchemy.Integer, **whole),
            alchemy.Column("record", text, nullable=False),
            alchemy.Column("hash", alchemy.String(64), nullable=False),
        )
        options: dict[str, Any] = {}
        if self._path is not None:
            where, options = (
                "sqlite://",
                {"creator": functools.partial(_opened, self._path)},
            )
        elif "postgresql" in where:
            options = {"connect_args": {"connect_timeout": _CONNECT_S}}
        options |= {"isolation_level": "SERIALIZABLE", "poolclass": alchemy.NullPool}
        try:
            self._engine = alchemy.create_engine(where, **options)
        except ImportError as error:  # the URL's driver is not installed
            raise ImportError(
                f"book {self._shown} needs the database's driver for Python, with the "
                f"module {error.name}, which is not installed"
            ) from None
        except alchemy.exc.SQLAlchemyError:
            raise ValueError(
                f"book must be a path, or a URL like postgresql+psycopg://user@host/"
                f"database; got {self._shown}"
            ) from None

    def create(self, row: Row) -> None:
        """Makes the book with its first row; a crash may leave a file without it."""

        def first(rows: Rows) -> None:
            if rows.read():
                raise FileExistsError(
                    f"there is already a book at {self._shown}: name another database"
                )
            rows.append(row)

        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = os.O_RDWR | os.O_CREAT | os.O_EXCL
            try:
                os.close(owner_only(str(self._path), new))
            except FileExistsError:
                said = f"{self._path} exists: name another file"
                raise FileExistsError(said) from None
        try:
            with self._translated_errors(), self._engine.begin() as connection:
                if self._path is None:
                    self._table.create(connection, checkfirst=True)
                else:
                    connection.exec_driver_sql(_SCHEMA)
            self.transaction(first)
        except Exception:
            if self._path is not None:
                self._path.unlink()
            raise

    def transaction(
        self, act: Callable[[Rows], Result], *, writes: bool = True
    ) -> Result:
        """Runs ``act`` in a transaction; repeats it if another transaction won."""
        if self._path is not None:
            if not self._path.exists():
                raise FileNotFoundError(f"there is no book {self._path}")
            try:
                check_plain_file(self._path)
            except ValueError as error:
                raise BookError(f"book {error}") from None
        errors, pause = self._alchemy.exc, _PAUSE_S
        end = time.monotonic() + _PATIENCE_S
        with self._translated_errors():
            while True:
                try:
                    with self._engine.begin() as connection:
                        if self._path is not None:
                            # Locks the file, so that no other process writes meanwhile.
                            begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
                            connection.exec_driver_sql(begin)
                        self._check_schema(connection)
                        return act(Rows(connection, self._table))
                except errors.DBAPIError as error:
                    state = getattr(error.orig, "sqlstate", None) or ""
                    lost = isinstance(error, errors.IntegrityError)
                    if self._path or not (lost or state.startswith(_LOST)):
                        raise
                    if time.monotonic() > end:
                        raise BlockingIOError(
                            f"book {self._shown} is in use: other processes have been "
                            f"charging it for {_PATIENCE_S:g} s"
                        ) from None
                # A random time, as others that lost would try at the same moment.
                time.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
                pause = min(1.5 * pause, 1.0)

    def _check_schema(self, connection: Any) -> None:
        """Refuses what could change or drop a row: triggers, views, other tables."""
        if self._path is None:
            found = int(TABLE in self._alchemy.inspect(connection).get_view_names())
            if connection.dialect.name in _WITH_TRIGGERS:
                query = self._alchemy.text(_TRIGGERS)
                found += connection.execute(query, {"name": TABLE}).scalar()
            if found:
                raise BookError(
                    f"book {self._shown} must be a table without triggers, got a view "
                    "or a table with triggers: a record might be lost. Nothing was "
                    "charged"
                )
            return
        query = "SELECT type, name, sql FROM sqlite_master"
        schema = [tuple(row) for row in connection.exec_driver_sql(query)]
        if not any(name == TABLE for _, name, _ in schema):
            raise BookError(f"{self._path} is no book: it has no table {TABLE}")
        if schema != [("table", TABLE, _SCHEMA)]:
            others = [f"{kind} {name}" for kind, name, sql in schema if sql != _SCHEMA]
            raise BookError(
                f"book {self._path} must have the table {TABLE} as it was made, and "
                f"nothing else, got {', '.join(others)!r}: the file was changed, and a "
                "record might be lost. Nothing was charged"
            )
        if connection.exec_driver_sql(_SIZE).scalar() > _MOST_READ:
            raise BookError(
                f"book {self._path}: its records have more than {_MOST_READ:,} bytes"
            )

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raises the database's errors as our own, without passwords."""
        book, errors = f"book {self._shown}", self._alchemy.exc
        try:
            yield
        except UnicodeDecodeError as error:
            raise BookError(f"{book} is damaged: {error}") from None
        except errors.SQLAlchemyError as error:
            orig = getattr(error, "orig", None)
            reason = shown(one_line(orig or error))
            if isinstance(orig, sqlite3.OperationalError) and self._path is not None:
                with refusing(self._path, BookError):
                    raise orig from None
            if isinstance(orig, sqlite3.DatabaseError):
                said = f"{self._shown} is no book, or it is damaged: {reason}"
                raise BookError(said) from None
            if isinstance(error, errors.ProgrammingError):
                said = f"there is no usable book at {self._shown}: {reason}"
                raise BookError(said) from None
            if isinstance(error, errors.OperationalError):
                raise ConnectionError(
                    f"{book} could not be reached: {reason}"
                ) from None
            raise OSError(f"{book}: {type(error).__name__}") from None


def shown(where: str) -> str:
    """Returns a path or URL with its password, if it has one, replaced by asterisks."""
    named = re.sub(r"(://[^/@:]*):.*@", r"\1:***@", where)
    return re.sub(r"(password=)[^&\s]*", r"\1***", named)


def _opened(path: Path) -> sqlite3.Connection:
    """A connection to an SQLite file that begins no transactions by itself."""
    connection = connect(path, "rw")  # the file may be a stranger's
    # A commit returns when it is on the disk, with the names in its folder.
    connection.execute("PRAGMA synchronous = EXTRA")
    return connection
