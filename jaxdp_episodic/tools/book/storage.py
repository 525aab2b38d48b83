"""A book's table of numbered rows, in an SQLite file or a database of SQLAlchemy.

A transaction reads all rows that its process has not checked, and adds at most one. Row
numbers are the primary key, so of two transactions that add the same one fails, at any
isolation level.
"""

from __future__ import annotations

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
from jaxdp_episodic.files.atomic import TEMPORARY, sync_folder
from jaxdp_episodic.files.optional import require

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

    def append(self, row: Row) -> None:
        """Adds a row, and reads it back: a trigger or a rule may have dropped it."""
        self._connection.execute(self._table.insert().values(**row._asdict()))
        if self.read(row.number) != [row]:
            raise BookError(
                f"record {row.number} is not there after it was written: something in "
                "the database, like a trigger or a rule, drops or changes it. Nothing "
                "was charged"
            )


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
        long = alchemy.Text(_MOST_BYTES), "mysql", "mariadb"
        text = alchemy.Text().with_variant(*long)
        whole = {"primary_key": True, "autoincrement": False}
        self._table = alchemy.Table(
            TABLE,
            alchemy.MetaData(),
            alchemy.Column("number", alchemy.Integer, **whole),
            alchemy.Column("record", text, nullable=False),
            alchemy.Column("hash", alchemy.String(64), nullable=False),
        )
        self._engine = self._engine_of(self._path or where)

    def create(self, row: Row) -> None:
        """Makes the book with its first row."""
        if self._path is not None:
            return self._create_file(self._path, row)

        def first(rows: Rows) -> None:
            if rows.read():
                raise FileExistsError(
                    f"there is already a book at {self._shown}: name another database"
                )
            rows.append(row)

        with self._translated_errors():
            self._table.create(self._engine, checkfirst=True)
        self.transaction(first)

    def _create_file(self, path: Path, row: Row) -> None:
        """Makes the book in a new file, which gets its name when it is complete."""
        taken = f"{path} exists: name another file"
        if path.exists():
            raise FileExistsError(taken)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + TEMPORARY + secrets.token_hex(6))
        os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with (
                self._translated_errors(),
                self._engine_of(temporary).begin() as connection,
            ):
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                connection.exec_driver_sql(_SCHEMA)
                Rows(connection, self._table).append(row)
            os.link(temporary, path)  # unlike a rename it replaces nothing
        except FileExistsError:
            raise FileExistsError(taken) from None
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)

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
                        raise self._in_use() from None
                # A random time, as others that lost would try at the same moment.
                time.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
                pause = min(1.5 * pause, 1.0)

    def _engine_of(self, place: Path | str) -> Any:
        alchemy, options = self._alchemy, {}
        if isinstance(place, Path):
            place, options = "sqlite://", {"creator": lambda file=place: _opened(file)}
        elif "postgresql" in place:
            options = {"connect_args": {"connect_timeout": _CONNECT_S}}
        try:
            return alchemy.create_engine(
                place,
                isolation_level="SERIALIZABLE",
                poolclass=alchemy.NullPool,
                **options,
            )
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

    def _in_use(self) -> BlockingIOError:
        return BlockingIOError(
            f"book {self._shown} is in use: other processes have locked it for "
            f"{_PATIENCE_S:g} s"
        )

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raises the database's errors as our own, without passwords."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise BookError(f"book {self._shown} is damaged: {error}") from None
        except self._alchemy.exc.SQLAlchemyError as error:
            raise self._translated(error) from None

    def _translated(self, error: Exception) -> Exception:
        errors, orig = self._alchemy.exc, getattr(error, "orig", None)
        reason = shown(" ".join(str(orig).partition("\n")[0].split()))
        if isinstance(orig, sqlite3.OperationalError):
            if "locked" in reason:
                return self._in_use()
            code = getattr(orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            if code != sqlite3.SQLITE_ERROR:  # a fault of the disk, or missing rights
                return OSError(f"book {self._shown}: {reason}")
            return BookError(f"book {self._shown} is damaged: {reason}")
        if isinstance(orig, sqlite3.DatabaseError):
            return BookError(f"{self._shown} is no book, or it is damaged: {reason}")
        if isinstance(error, errors.ProgrammingError):
            return BookError(f"there is no usable book at {self._shown}: {reason}")
        if isinstance(error, errors.OperationalError):
            reason = shown(one_line(orig or error))
            return ConnectionError(f"book {self._shown} could not be reached: {reason}")
        return OSError(f"book {self._shown}: {type(error).__name__}")


def shown(where: str) -> str:
    """Returns a path or URL with its password, if it has one, replaced by asterisks."""
    named = re.sub(r"(://[^/@:]*):.*@", r"\1:***@", where)
    return re.sub(r"(password=)[^&\s]*", r"\1***", named)


def _opened(path: Path) -> sqlite3.Connection:
    """A connection to an SQLite file that begins no transactions by itself."""
    address = f"{path.resolve().as_uri()}?mode=rw"
    connection = sqlite3.connect(
        address, uri=True, timeout=_PATIENCE_S, isolation_level=None
    )
    # A commit returns when it is on the disk, with the name of its journal removed.
    connection.execute("PRAGMA synchronous = EXTRA")
    connection.execute("PRAGMA trusted_schema = OFF")  # the file may be a stranger's
    return connection
