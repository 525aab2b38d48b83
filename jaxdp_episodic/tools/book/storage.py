"""Where a book is kept: an SQLite file, or any database that SQLAlchemy knows.

A book is a table of numbered rows, to which one is appended at a time, in a transaction
that has read all the others. Its number is the table's key: of two transactions that
read the same rows one fails, at whatever isolation the database has. What was committed
is on the disk.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxdp_episodic.files import optional
from jaxdp_episodic.files.archive import check_plain_file
from jaxdp_episodic.files.atomic import TEMPORARY, sync_folder

TABLE = "jaxdp_episodic_book"
# How a file's one table was made: nothing else may be in the file.
_SCHEMA = (
    f"CREATE TABLE {TABLE} (number INTEGER PRIMARY KEY, "
    "record TEXT NOT NULL, hash TEXT NOT NULL)"
)
# Databases that list their triggers by the standard's table, and the question.
_WITH_TRIGGERS = ("postgresql", "mysql", "mariadb")
_TRIGGERS = (
    "SELECT count(*) FROM information_schema.triggers WHERE event_object_table = :name"
)
# Seconds that one process waits for others which have the book.
_PATIENCE_S = 60.0
# Seconds until a database that does not answer is given up, where its driver can.
_CONNECT_S = 20
# Seconds between tries to write, at first; they grow by half each time, up to a second.
_PAUSE_S = 0.01
# Bytes of all records of a file that are read into memory.
_MOST_READ = 2**28
# Bytes of a record: MySQL has several types of text.
_MOST_BYTES = 2**26
# "database+driver://", as of every URL of SQLAlchemy.
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+_.-]*)://")
# SQLSTATE classes of a transaction that lost against another, and of a duplicate key.
_LOST = ("40", "23")

Result = TypeVar("Result")


class BookError(ValueError):
    """No book, one that is damaged, or one of a version that is not known."""


class Row(NamedTuple):
    """One record of a book, as it is stored."""

    number: int
    record: str
    hash: str


class Rows(Protocol):
    """The rows of a book, within a transaction."""

    def read(self) -> list[Row]:
        """Returns all rows, in order."""
        ...

    def append(self, row: Row) -> None:
        """Adds a row."""
        ...


class Storage(Protocol):
    """A place for one book."""

    def create(self, row: Row) -> None:
        """Makes the book, with its first row; refuses to replace one."""
        ...

    def transaction(
        self, act: Callable[[Rows], Result], *, writes: bool = True
    ) -> Result:
        """Runs ``act`` in a transaction, again where another one came first."""
        ...


def storage_of(where: str) -> Storage:
    """Returns the storage that a path or a URL names; nothing is opened yet.

    Raises:
      ImportError: SQLAlchemy, or a driver, is not installed.
      ValueError: a URL that cannot be read.
    """
    scheme = _SCHEME.match(where)
    if scheme is None:
        return _File(Path(where))
    if scheme[1].partition("+")[0] == "sqlite":
        raise ValueError(
            "book must be a path or a URL; of an SQLite file give the path"
        )
    return _Database(where)


def shown(where: str) -> str:
    """Returns a path or URL without the password that may be in it."""
    named = re.sub(r"(://[^/@:]*):.*@", r"\1:***@", where)
    return re.sub(r"(password=)[^&\s]*", r"\1***", named)


def _check_stored(row: Row, found: list[Row]) -> None:
    """Refuses a database that did not take a row: something in it changes writes."""
    if found != [row]:
        raise BookError(
            f"record {row.number} is not there after it was written: something in the "
            "database, like a trigger or a rule, swallows or changes what is written. "
            "Nothing was charged"
        )


class _Connected:
    """`Rows` of an SQLite connection, within a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def read(self) -> list[Row]:
        size = f"SELECT total(length(CAST(record AS BLOB))) FROM {TABLE}"
        if self._connection.execute(size).fetchone()[0] > _MOST_READ:
            raise BookError(f"its records have more than {_MOST_READ:,} bytes")
        found = self._connection.execute(
            f"SELECT number, record, hash FROM {TABLE} ORDER BY number"
        )
        return [Row(*row) for row in found]

    def append(self, row: Row) -> None:
        self._connection.execute(f"INSERT INTO {TABLE} VALUES (?, ?, ?)", row)
        last = f"SELECT number, record, hash FROM {TABLE} WHERE number >= ?"
        found = self._connection.execute(last, (row.number,)).fetchall()
        _check_stored(row, [Row(*each) for each in found])


class _File:
    """A book in an SQLite file, by Python's own module."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, row: Row) -> None:
        if self._path.exists():
            raise FileExistsError(f"{self._path} is there already: name another file")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        word = TEMPORARY + secrets.token_hex(6)
        temporary = self._path.with_name(self._path.name + word)
        os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with closing(self._connection(temporary)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(_SCHEMA)
                _Connected(connection).append(row)
                connection.execute("COMMIT")
            os.link(temporary, self._path)  # unlike a rename it replaces nothing
        except FileExistsError:
            raise FileExistsError(
                f"{self._path} is there already: name another file"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self._path.parent)

    def transaction(
        self, act: Callable[[Rows], Result], *, writes: bool = True
    ) -> Result:
        if not self._path.exists():
            raise FileNotFoundError(f"there is no book {self._path}")
        try:
            check_plain_file(self._path)
        except ValueError as error:
            raise BookError(f"book {error}") from None
        with self._understood(), closing(self._connection(self._path)) as connection:
            # Nobody else may write between what is read here and what is written.
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                self._check_schema(connection)
                result = act(_Connected(connection))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Refuses a file with a trigger, a view, or anything but the one table."""
        found = connection.execute("SELECT type, name, sql FROM sqlite_master")
        schema = found.fetchall()
        if not any(name == TABLE for _, name, _ in schema):
            raise BookError(f"{self._path} is no book: it has no table {TABLE}")
        if schema != [("table", TABLE, _SCHEMA)]:
            others = [f"{kind} {name}" for kind, name, sql in schema if sql != _SCHEMA]
            raise BookError(
                f"book {self._path} must have the table {TABLE} as it was made, and "
                f"nothing else, got {', '.join(others)!r}: somebody has changed it, "
                "and what is written might be lost. Nothing was charged"
            )

    @staticmethod
    def _connection(path: Path) -> sqlite3.Connection:
        address = f"{path.resolve().as_uri()}?mode=rw"
        connection = sqlite3.connect(
            address, uri=True, timeout=_PATIENCE_S, isolation_level=None
        )
        # A commit is on the disk, its journal's name too, when it returns.
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("PRAGMA trusted_schema = OFF")  # anybody's file
        return connection

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise BlockingIOError(
                    f"book {self._path} is in use: other processes have had it for "
                    f"{_PATIENCE_S:g} s"
                ) from None
            # Neither the disk nor rights: what is in the file is not understood.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            if code == sqlite3.SQLITE_ERROR:
                raise BookError(f"book {self._path} is damaged: {error}") from None
            raise OSError(f"book {self._path}: {error}") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise BookError(
                f"{self._path} is no book, or it is damaged: {error}"
            ) from None


class _Database:
    """A book in a database of SQLAlchemy's."""

    def __init__(self, url: str) -> None:
        self._alchemy = alchemy = optional.require(
            "sqlalchemy", purpose="a book at a URL", extra="book"
        )
        self._shown = shown(url)
        try:
            self._engine = alchemy.create_engine(
                url,
                isolation_level="SERIALIZABLE",
                poolclass=alchemy.NullPool,
                connect_args=(
                    {"connect_timeout": _CONNECT_S} if "postgresql" in url else {}
                ),
            )
        except ImportError as error:  # of the driver that the URL names
            raise ImportError(
                f"book {self._shown} needs the database's driver for Python, with the "
                f"module {error.name}, which is not installed"
            ) from None
        except alchemy.exc.SQLAlchemyError:
            raise ValueError(
                f"book must be a path, or a URL like postgresql+psycopg://user@host/"
                f"database; got {self._shown}"
            ) from None
        self._table = alchemy.Table(
            TABLE,
            alchemy.MetaData(),
            alchemy.Column(
                "number", alchemy.Integer, primary_key=True, autoincrement=False
            ),
            alchemy.Column(
                "record",
                alchemy.Text().with_variant(
                    alchemy.Text(_MOST_BYTES), "mysql", "mariadb"
                ),
                nullable=False,
            ),
            alchemy.Column("hash", alchemy.String(64), nullable=False),
        )

    def create(self, row: Row) -> None:
        def first(rows: Rows) -> None:
            if rows.read():
                raise FileExistsError(
                    f"there is a book at {self._shown} already: name another database"
                )
            rows.append(row)

        with self._understood():
            self._table.create(self._engine, checkfirst=True)
        self.transaction(first)

    def transaction(
        self, act: Callable[[Rows], Result], *, writes: bool = True
    ) -> Result:
        del writes  # the isolation is the same
        errors, pause = self._alchemy.exc, _PAUSE_S
        end = time.monotonic() + _PATIENCE_S
        with self._understood():
            while True:
                try:
                    with self._engine.begin() as connection:
                        self._check_schema(connection)
                        return act(self._Rows(connection, self._table))
                except errors.DBAPIError as error:
                    state = getattr(error.orig, "sqlstate", None) or ""
                    lost = isinstance(error, errors.IntegrityError)
                    if not (lost or state.startswith(_LOST)):
                        raise
                    if time.monotonic() > end:
                        raise BlockingIOError(
                            f"book {self._shown} is in use: others were first for "
                            f"{_PATIENCE_S:g} s"
                        ) from None
                # Not together with those that lost against the same one.
                time.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
                pause = min(1.5 * pause, 1.0)

    def _check_schema(self, connection: Any) -> None:
        """Refuses a view in the table's place, and a table with triggers."""
        found = int(TABLE in self._alchemy.inspect(connection).get_view_names())
        if connection.dialect.name in _WITH_TRIGGERS:
            query = self._alchemy.text(_TRIGGERS)
            found += connection.execute(query, {"name": TABLE}).scalar()
        if found:
            raise BookError(
                f"book {self._shown} must be a table without triggers, got a view, or "
                "a table with some: what is written might be lost. Nothing was charged"
            )

    class _Rows:
        """`Rows` of a connection."""

        def __init__(self, connection: Any, table: Any) -> None:
            self._connection, self._table = connection, table

        def read(self) -> list[Row]:
            query = self._table.select().order_by(self._table.c.number)
            return [Row(*row) for row in self._connection.execute(query)]

        def append(self, row: Row) -> None:
            self._connection.execute(self._table.insert().values(**row._asdict()))
            last = self._table.select().where(self._table.c.number >= row.number)
            found = [Row(*each) for each in self._connection.execute(last)]
            _check_stored(row, found)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """SQLAlchemy's errors as ours, without the password that they may show."""
        errors = self._alchemy.exc
        try:
            yield
        except errors.ProgrammingError as error:
            reason = str(error.orig).partition("\n")[0]
            raise BookError(
                f"there is no book that can be used at {self._shown}: {reason}"
            ) from None
        except errors.OperationalError as error:
            reason = " ".join(str(error.orig).split())
            raise ConnectionError(
                f"book {self._shown} could not be reached: {shown(reason)}"
            ) from None
        except errors.SQLAlchemyError as error:
            raise OSError(f"book {self._shown}: {type(error).__name__}") from None
