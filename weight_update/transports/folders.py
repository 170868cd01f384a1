"""Folders that a sender writes weights into: complete as soon as they are there, and cleaned up."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
import threading
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from weight_update.errors import ConfigurationError, EngineRejected
from weight_update.transports.tensor_file import sync_folder

_MEMORY = Path("/dev/shm")
# Two versions exist while an update runs, and this is for everything else in them.
_SPARE_BYTES = 64 << 20
_LOCK = "lock"
# Some shared file systems have no locks unless they are mounted with them.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_HOME = re.compile(r"weight-update-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{32}")


class VersionFolders:
    """Folders of one sender, one an update, in a home of their own.

    The home is made when the first folder is written. Files and folders get the modes that the
    process's umask says: engines that run as other users read them under the usual one.

    1. :meth:`written` for each update; leftovers of senders that died on this host go first.
    2. :meth:`reading` while an engine loads one: it stays until the engine answered.
    3. :meth:`keep_newest` once every engine has an update: engines name its folder as their
       model, so it stays until the next one was taken, however many fail in between.
    4. :meth:`close`, or the end of the process, removes everything.

    Args:
        directory: Where the home is made, under a path that engines see too. None takes this
            host's memory, or else its temporary directory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = None if directory is None else directory.absolute()
        self._home: Path | None = None
        self._taken: list[Path] = []
        self._written: list[Path] = []
        self._old: list[Path] = []
        self._readers: dict[str, Path] = {}
        self._lock = threading.Lock()  # of the readers: engines read in threads of their own
        self._cleaner: weakref.finalize[[Path, int, int], VersionFolders] | None = None

    @property
    def place(self) -> str:
        """Where folders are written, in words."""
        return "a folder of this host" if self._directory is None else str(self._directory)

    @contextmanager
    def written(self, nbytes: int) -> Iterator[tuple[Path, Path]]:
        """A folder that is being filled, and the path that it has once the body ends.

        It is removed if the body fails.

        Args:
            nbytes: What will be written; the space for it must be there.

        Raises:
            ConfigurationError: There is no such space, or the directory cannot be written.
            OSError: The same, found out later.
        """
        home = self._at_home(nbytes)
        self._forget(self._written[:-1])  # an engine may still read the last
        _check_space(home, nbytes)
        name = uuid4().hex
        unfinished, place = home / f".unfinished-{name}", home / f"version-{name}"
        unfinished.mkdir()
        try:
            yield unfinished, place
            sync_folder(unfinished)
            unfinished.rename(place)
            sync_folder(home)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._written.append(place)

    @contextmanager
    def reading(self, place: Path, url: str) -> Iterator[None]:
        """Keeps a folder while the engine at a URL reads it.

        One that does not answer may read on, and ends if it finds a file gone. It keeps the folder
        until it is told of another, which it obeys when it is done.
        """
        with self._lock:
            self._readers[url] = place
        answered = False
        try:
            yield
            answered = True
        except EngineRejected as error:
            answered = error.applied != "unknown"
            raise
        finally:
            with self._lock:
                if answered and self._readers.get(url) == place:
                    del self._readers[url]

    def forget_all_but(self, urls: Container[str]) -> None:
        """Keeps nothing for engines that are not among these: they left the fleet.

        Else each that died and was removed would keep a whole model.
        """
        with self._lock:
            kept = {url: place for url, place in self._readers.items() if url in urls}
            self._readers = kept

    def keep_newest(self) -> None:
        """Every engine of the update has the newest: older ones that nobody reads are removed."""
        if self._written:
            self._forget([*self._taken, *self._written[:-1]])
            self._taken, self._written = self._written, []

    def close(self) -> None:
        """Removes everything; a later update starts anew."""
        self._home = None
        self._forget_all()
        if self._cleaner is not None:
            self._cleaner()

    def _forget(self, folders: list[Path]) -> None:
        with self._lock:
            read = list(self._readers.values())
        self._old = [*self._old, *folders]
        for old in set(self._old).difference(read):
            shutil.rmtree(old, ignore_errors=True)
        self._old = [folder for folder in self._old if folder in read]
        self._written = [folder for folder in self._written if folder not in folders]

    def _forget_all(self) -> None:
        self._taken, self._written, self._old = [], [], []
        with self._lock:
            self._readers = {}

    def _at_home(self, nbytes: int) -> Path:
        if self._home is not None and self._home.is_dir():
            return self._home
        directory = self._directory or _roomy_directory(nbytes)
        remove_leftovers(directory)
        home = directory / f"weight-update-{_this_host()}-{os.getpid()}-{uuid4().hex}"
        try:
            home.mkdir()
            lock = _locked(home, needed=False)
        except OSError as error:
            raise _unwritable(directory, error) from error
        self._home = home
        self._forget_all()
        self._cleaner = weakref.finalize(self, _remove_home, home, lock, os.getpid())
        return home


def remove_leftovers(directory: Path) -> None:
    """Removes homes of this host's senders that ended without a word; of nobody else's."""
    with suppress(OSError):
        for home in directory.iterdir():
            found = _HOME.fullmatch(home.name)
            ours = found is not None and found["host"] == _this_host()
            if ours and found is not None and not _lives(int(found["pid"])):
                _remove_unlocked(home)


def _remove_unlocked(home: Path) -> None:
    # In another container a living process may have a number that is nobody's here.
    with suppress(OSError):
        if home.is_symlink() or home.stat().st_uid != os.geteuid():
            return
        os.close(_locked(home))
        shutil.rmtree(home, ignore_errors=True)


def _locked(home: Path, *, needed: bool = True) -> int:
    """A lock that the process holds until it ends; raises OSError while another one does.

    Where there are none, one that is not needed is a file like others: nobody ever removes what
    a sender leaves there, since nobody gets the lock.
    """
    handle = os.open(home / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if needed or error.errno not in _NO_LOCKS:
            os.close(handle)
            raise
    return handle


def _remove_home(home: Path, lock: int, process: int) -> None:
    if os.getpid() != process:
        return  # a fork's copy: the folders are the parent's
    shutil.rmtree(home, ignore_errors=True)
    with suppress(OSError):
        os.close(lock)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _this_host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def _roomy_directory(nbytes: int) -> Path:
    """This host's memory if two versions fit there, or else its temporary directory."""
    needed = 2 * nbytes + _SPARE_BYTES
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK)
    roomy = usable and shutil.disk_usage(_MEMORY).free >= needed
    return _MEMORY if roomy else Path(tempfile.gettempdir())


def _check_space(home: Path, nbytes: int) -> None:
    free = shutil.disk_usage(home).free
    if nbytes > free:
        raise ConfigurationError(
            f"the weights take {nbytes} bytes, and {home.parent} has {free} left",
            phase="plan",
            remedy="set directory= to a place that has room for two versions",
        )


def _unwritable(directory: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"weights cannot be written under {directory}: {error}",
        phase="plan",
        remedy="set directory= to a place that trainer and servers see under the same path",
    )
