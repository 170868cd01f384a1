"""Frozen options, read once from arguments and environment, and the checks that they pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from math import inf
from tempfile import TemporaryFile
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

import torch

from weight_update.errors import ConfigurationError

PauseMode = Literal["abort", "retract", "in_place"]
Strategy = Literal["tensordict", "state_dict"]
Backend = Literal["auto", "nccl", "gloo"]
OnFailure = Literal["hold", "resume"]
LoadFormat = Literal["auto", "flattened_bucket", "tensors"]
Transport = Literal["auto", "broadcast", "ipc", "disk"]
Way = Literal["broadcast", "ipc", "disk", "request"]
"""How the bytes of an update get to the engines: a :data:`Transport` that was chosen, or inside
the requests, as adapters do."""
TrainerRanks = Literal["one", "node"]
Verify = Literal["auto", "checksum", "sample", "off"]
WhenBusy = Literal["wait", "refuse"]
StaleCache = Literal["warn", "refuse"]
Quorum = Literal["all"] | int
Lora = Literal["merge", "adapter"]
DTypeLike = torch.dtype | Literal["engine"] | None
NameMap = Callable[[str], str | None] | Mapping[str, str]
"""A function from a checkpoint's name to the engine's (None leaves the weight out), or a table of
regular expressions and what they are replaced by."""
DeviceLike = int | str | torch.device | None

PAUSE_MODE_VARIABLE = "TORCHRL_SGLANG_PAUSE_GENERATION_MODE"
FLUSH_VARIABLE = "TORCHRL_SGLANG_WEIGHT_SYNC_FLUSH_CACHE"
API_KEY_VARIABLE = "WEIGHT_UPDATE_API_KEY"
ADMIN_API_KEY_VARIABLE = "WEIGHT_UPDATE_ADMIN_API_KEY"
MASTER_ADDRESS_VARIABLE = "WEIGHT_UPDATE_MASTER_ADDRESS"
BUCKET_BYTES_VARIABLE = "WEIGHT_UPDATE_BUCKET_BYTES"
DIRECTORY_VARIABLE = "WEIGHT_UPDATE_DIRECTORY"

# Three years: what the clocks of all systems below can count.
_LONGEST_SECONDS = 1e8

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class HttpOptions:
    """How to talk to the engines.

    Attributes:
        api_key: Bearer key of the ordinary routes.
        admin_api_key: Bearer key of the control routes; ``api_key`` when not given.
        tls_verify: Whether certificates are checked.
        ca_file: A certificate authority file to check them against.
        use_proxies: Whether HTTP proxies of the environment apply. Off by default: control
            calls go to loopback and cluster addresses, which a proxy cannot reach.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    tls_verify: bool = True
    ca_file: str | None = None
    use_proxies: bool = False

    def __post_init__(self) -> None:
        check_flag("tls_verify", self.tls_verify)
        check_flag("use_proxies", self.use_proxies)
        if self.ca_file is not None and not os.path.exists(self.ca_file):
            raise ConfigurationError(f"ca_file={self.ca_file!r} does not exist")
        if self.ca_file is not None and not self.tls_verify:
            raise ConfigurationError(
                f"ca_file={self.ca_file!r} checks certificates, and tls_verify=False checks none",
                remedy="leave one of both out",
            )

    @classmethod
    def read(
        cls,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        *,
        tls_verify: bool = True,
        ca_file: str | None = None,
        use_proxies: bool = False,
    ) -> HttpOptions:
        """Options with the keys from the arguments or else the environment."""
        return cls(
            api_key=read_secret("api_key", api_key, API_KEY_VARIABLE),
            admin_api_key=read_secret("admin_api_key", admin_api_key, ADMIN_API_KEY_VARIABLE),
            tls_verify=tls_verify,
            ca_file=ca_file,
            use_proxies=use_proxies,
        )

    def key_for(self, *, control: bool) -> str | None:
        """The bearer key for a control route or an ordinary one."""
        ordered = (self.admin_api_key, self.api_key) if control else (self.api_key,)
        return next((key for key in ordered if key), None) or self.admin_api_key


@dataclass(frozen=True)
class UpdateOptions:
    """Everything that shapes an update; see :class:`~weight_update.SGLangWeightSyncScheme`."""

    master_address: str | None = None
    master_port: int | None = None
    num_gpus: int | None = None
    device: DeviceLike = None
    flush_cache_on_update: bool | None = None
    pause_mode: PauseMode | None = None
    backend: Backend = "auto"
    bucket_bytes: int | None = None
    load_format: LoadFormat = "auto"
    transport: Transport = "auto"
    directory: str | None = None
    trainer_ranks: TrainerRanks = "one"
    timeout: float = 300.0
    on_failure: OnFailure = "hold"
    dtype: DTypeLike = None
    name_map: NameMap | None = None
    trim_vocabulary: bool = False
    check_finite: bool = False
    lora: Lora = "merge"
    lora_name: str = "policy"
    quorum: Quorum = "all"
    initial_version: int | None = None
    verify: Verify = "auto"
    when_busy: WhenBusy = "wait"
    stale_cache: StaleCache = "warn"
    reads_variables: bool = True
    """Whether TorchRL's variables, which are SGLang's, count; those of the library always do."""
    http: HttpOptions = field(default_factory=HttpOptions)

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, Backend)
        if self.flush_cache_on_update is not None:
            check_flag("flush_cache_on_update", self.flush_cache_on_update)
        self.effective_pause_mode()
        self.flush_wanted()
        check_choice("on_failure", self.on_failure, OnFailure)
        check_choice("load_format", self.load_format, LoadFormat)
        check_choice("transport", self.transport, Transport)
        check_choice("trainer_ranks", self.trainer_ranks, TrainerRanks)
        check_choice("verify", self.verify, Verify)
        check_choice("when_busy", self.when_busy, WhenBusy)
        check_choice("stale_cache", self.stale_cache, StaleCache)
        check_choice("lora", self.lora, Lora)
        check_text("lora_name", self.lora_name)
        check_flag("trim_vocabulary", self.trim_vocabulary)
        check_flag("check_finite", self.check_finite)
        check_quorum(self.quorum)
        check_version(self.initial_version)
        check_positive("timeout", self.timeout, number=float)
        check_positive("num_gpus", self.num_gpus)
        check_positive("bucket_bytes", self.bucket_bytes)
        check_port(self.master_port)
        check_directory("directory", self.directory)
        if self.lora == "adapter" and self.transport != "auto":
            raise ConfigurationError(
                f"transport={self.transport!r} carries whole weights, and lora='adapter' sends an "
                "adapter, which travels inside the requests",
                remedy="leave transport='auto'",
            )
        check_dtype(self.dtype)
        parse_device(self.device)
        if self.backend == "nccl":
            _refuse_nccl_without_gpu(self.device)
        self._refuse_a_flush_that_cannot_be()

    def _refuse_a_flush_that_cannot_be(self) -> None:
        if self.flush_cache_on_update is False and self.stale_cache == "refuse":
            raise ConfigurationError(
                "stale_cache='refuse' refuses what flush_cache_on_update=False asks for: an update "
                "that leaves old prefixes in the cache",
                remedy="leave one of both out",
            )
        if self.flush_cache_on_update and self.effective_pause_mode() != "abort":
            raise ConfigurationError(
                "flush_cache_on_update=True needs pause_mode='abort', and the pause mode is "
                f"{self.effective_pause_mode()!r}",
                remedy="leave flush_cache_on_update=None: the cache is flushed wherever the "
                "engine's release can do it",
            )

    def effective_pause_mode(self) -> PauseMode:
        """The argument, else the environment, else ``retract``; read anew at every call."""
        if self.pause_mode is not None:
            check_choice("pause_mode", self.pause_mode, PauseMode)
            return self.pause_mode
        # An adapter is replaced once no request uses it, and retracted ones never end.
        usual = "abort" if self.lora == "adapter" else "retract"
        told = os.environ.get(PAUSE_MODE_VARIABLE, "") if self.reads_variables else ""
        value = told.strip().lower() or usual
        check_choice(PAUSE_MODE_VARIABLE, value, PauseMode)
        return cast("PauseMode", value)

    def of(self, url: str) -> UpdateOptions:  # noqa: ARG002
        """Those that hold for one engine: these, unless kinds of engines have their own."""
        return self

    def flush_wanted(self) -> bool:
        """Whether the prefix cache should be flushed; the environment wins when it is set."""
        from_environment = read_flag(FLUSH_VARIABLE) if self.reads_variables else None
        if from_environment is not None:
            return from_environment
        return self.flush_cache_on_update is not False


def check_choice(name: str, value: Any, accepted: Any) -> None:
    """Raises unless ``value`` is one of the literals of ``accepted``.

    Raises:
        ConfigurationError: The text lists what is accepted.

    Example:
        >>> check_choice("pause_mode", "retarct", PauseMode)
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: pause_mode='retarct' is unknown; accepted: ...
    """
    if not isinstance(value, str) or value not in get_args(accepted):
        choices = ", ".join(repr(choice) for choice in get_args(accepted))
        raise ConfigurationError(f"{name}={value!r} is unknown; accepted: {choices}")


def check_quorum(quorum: Any, engines: int | None = None) -> None:
    """Raises ConfigurationError unless ``quorum`` is "all" or a number of engines there are."""
    if quorum != "all":
        if isinstance(quorum, str):
            raise ConfigurationError(f"quorum={quorum!r} must be 'all' or a number of engines")
        check_positive("quorum", 0 if quorum is None else quorum)
    if engines is not None and quorum != "all" and quorum > engines:
        raise ConfigurationError(f"quorum={quorum}, but there are only {engines} engine(s)")


def check_version(version: Any) -> None:
    """Raises ConfigurationError unless ``version`` is None or a whole number from zero on."""
    if version is None:
        return
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ConfigurationError(
            f"initial_version={version!r} must be a whole number, zero or above"
        )


def check_flag(name: str, value: Any) -> None:
    """Raises ConfigurationError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be True or False")


def check_positive(name: str, value: Any, number: type = int) -> None:
    """Raises ConfigurationError unless ``value`` is None or a finite number above zero."""
    if value is None and number is int:
        return
    kinds = (int,) if number is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < inf:
        what = "a whole number" if number is int else "a finite number of seconds"
        raise ConfigurationError(f"{name}={value!r} must be {what} above zero")
    if number is not int and value > _LONGEST_SECONDS:
        raise ConfigurationError(f"{name}={value!r} is longer than any wait can be")


def check_port(port: Any) -> None:
    """Raises ConfigurationError unless ``port`` is None or a TCP port."""
    valid = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536
    if port is not None and not valid:
        raise ConfigurationError(f"master_port={port!r} must be between 1 and 65535")


def check_directory(name: str, directory: Any) -> None:
    """Raises ConfigurationError unless ``directory`` is None or a folder that can be written.

    Example:
        >>> check_directory("directory", "/nowhere")
        Traceback (most recent call last):
        weight_update.errors.ConfigurationError: directory='/nowhere' cannot be written: No such...
    """
    if directory is None:
        return
    try:
        if not directory:
            raise ValueError("it names no folder")
        with TemporaryFile(dir=directory):
            return
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name}={directory!r} cannot be written: {getattr(error, 'strerror', None) or error}",
            remedy="name a folder that is there, and that trainer and servers see under this path",
        ) from error


def check_dtype(dtype: Any) -> None:
    """Raises ConfigurationError unless ``dtype`` is None, "engine" or a floating torch dtype."""
    if dtype is None or (isinstance(dtype, str) and dtype == "engine"):
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(
            f"dtype={dtype!r} must be a floating point torch dtype, such as torch.bfloat16, or "
            "'engine' for its own"
        )


def check_text(name: str, value: Any) -> None:
    """Raises ConfigurationError unless ``value`` is printable text of at least one character."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigurationError(f"{name}={value!r} must be a line of text")


def parse_device(device: DeviceLike) -> torch.device | None:
    """The torch device that an argument means; None follows the model.

    Raises:
        ConfigurationError: The text or index names no device.

    Example:
        >>> parse_device("cuda"), parse_device(2), parse_device("cpu")
        (device(type='cuda', index=0), device(type='cuda', index=2), device(type='cpu'))
    """
    if device is None:
        return None
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise ConfigurationError(f"device={device!r} must be an index, a string or a torch.device")
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device={device!r} names no device: {error}") from error
    if parsed.type == "cuda" and parsed.index is None:
        return torch.device("cuda", 0)
    return parsed


def _refuse_nccl_without_gpu(device: DeviceLike) -> None:
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "backend='nccl' needs CUDA, and torch sees no GPU",
            remedy="use backend='gloo', or a CUDA build of torch",
        )
    named = parse_device(device)
    if named is not None and named.type != "cuda":
        raise ConfigurationError(
            f"backend='nccl' does not go with device={str(device)!r}: NCCL moves bytes of a GPU",
            remedy="leave device=None, or use backend='gloo'",
        )


def check_device_exists(device: torch.device | None) -> None:
    """Raises ConfigurationError if a CUDA device is meant that torch does not see."""
    if device is None or device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"device='{device}' asks for CUDA, and torch {torch.__version__} sees no GPU",
            remedy="use device='cpu', or leave device=None to follow the model",
        )
    if device.index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device='{device}' does not exist: torch sees {torch.cuda.device_count()} GPU(s)"
        )


def read_flag(variable: str) -> bool | None:
    """A yes-or-no environment variable; None when it is unset or empty.

    Raises:
        ConfigurationError: The value is none of the accepted spellings.
    """
    value = os.environ.get(variable, "").strip().lower()
    if not value:
        return None
    if value not in (*_TRUE, *_FALSE):
        accepted = ", ".join((*_TRUE, *_FALSE))
        raise ConfigurationError(f"{variable}={value!r} is unreadable; accepted: {accepted}")
    return value in _TRUE


def read_bucket_bytes() -> int | None:
    """The bucket size of the environment, if one is set.

    Raises:
        ConfigurationError: The value is not a whole number above zero.
    """
    value = os.environ.get(BUCKET_BYTES_VARIABLE, "").strip()
    if not value:
        return None
    if not value.isdecimal() or int(value) == 0:
        raise ConfigurationError(
            f"{BUCKET_BYTES_VARIABLE}={value!r} is unreadable; accepted: a whole number of bytes"
        )
    return int(value)


def read_directory(argument: str | os.PathLike[str] | None) -> str | None:
    """The folder of an argument, or else that of the environment, if one is set.

    Raises:
        ConfigurationError: That of the environment cannot be written.
    """
    if argument is not None:
        return os.fspath(argument)
    directory = read_text(DIRECTORY_VARIABLE)
    check_directory(DIRECTORY_VARIABLE, directory)
    return directory


def read_text(variable: str) -> str | None:
    """An environment variable, trimmed; None when it is unset or empty."""
    return os.environ.get(variable, "").strip() or None


def read_secret(name: str, argument: str | None, variable: str) -> str | None:
    """An API key from the argument or else the environment, trimmed; None when empty."""
    value = argument if argument is not None else os.environ.get(variable, "")
    if not isinstance(value, str) or not all(" " <= c <= "~" for c in value.strip()):
        source = name if argument is not None else variable
        raise ConfigurationError(f"{source} must be one line of ASCII text")
    return value.strip() or None


def parse_server_urls(server_url: str | Sequence[str]) -> tuple[str, ...]:
    """Checked URLs of the engines, without trailing slashes.

    Raises:
        ConfigurationError: None given, one given twice, or one without scheme or host.

    Example:
        >>> parse_server_urls("http://a:30000/")
        ('http://a:30000',)
    """
    several = isinstance(server_url, Sequence) and not isinstance(server_url, (str, bytes))
    given = list(server_url) if several else [server_url]
    if not given:
        raise ConfigurationError("server_url is empty", remedy="name at least one engine")
    urls = tuple(_checked_url(url) for url in given)
    places = [place_of(url) for url in urls]
    repeated = sorted({u for u, place in zip(urls, places, strict=True) if places.count(place) > 1})
    if repeated:
        raise ConfigurationError(f"server_url names an engine twice: {', '.join(repeated)}")
    return urls


def place_of(url: str) -> str:
    """Where a URL leads, however it is spelled.

    Example:
        >>> place_of("http://localhost:80/a/") == place_of("http://127.0.0.1/a")
        True
        >>> place_of("http://[::1]") == place_of("http://[0:0:0:0:0:0:0:1]:80")
        True
    """
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    with suppress(ValueError):
        host = str(ip_address(host or ""))
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{host}:{port}{parts.path.rstrip('/')}"


def _checked_url(url: Any) -> str:
    if not isinstance(url, str):
        raise ConfigurationError(f"server_url={url!r} must be text such as 'http://host:30000'")
    trimmed = url.strip().rstrip("/")
    if "@" in trimmed:
        host = trimmed.rpartition("@")[2]
        raise ConfigurationError(
            f"server_url for {host!r} carries credentials", remedy="use api_key="
        )
    try:
        parts = urlsplit(trimmed)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise ConfigurationError(f"server_url={url!r}: {error}") from error
    known = parts.scheme in ("http", "https") and parts.hostname
    if not known or parts.query or parts.fragment:
        raise ConfigurationError(
            f"server_url={url.partition('?')[0]!r} needs a scheme and a host, and no query",
            remedy="write 'http://host:30000'",
        )
    return trimmed
