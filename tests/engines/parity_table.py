"""The parity table: what is asked of the real server and of the reference engine alike.

Pure data. A case is a list of steps; each step that gets an answer is an observation, and the
two engines' observations must be equal. A step with ``differs`` names an entry of
:data:`DIFFERENCES`: there the two must not be equal, so that no entry outlives its cause.

Nothing here kills or hangs a server: what does is in the engine's own documentation only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .models import CONTEXT

GROUP = "{group}"  # the name of the group that both ends of an engine are in
OTHER = "{other}"  # a second one
PORT = "{port}"  # where the first one met

PROMPT = (3, 14, 15, 92, 65)
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"

#: Everything that is known to differ, in the words of the reference engine's README.
DIFFERENCES: dict[str, str] = {
    "sampling": "`n` and stop strings are refused; SGLang implements them.",
    "stream": "`stream` is refused; SGLang streams.",
    "list for one prompt": "A list of sampling parameters beside a single prompt is taken; SGLang "
    "answers 500.",
    "lenient": "Fields are taken only as what they are; SGLang also takes whole numbers as text or "
    "as floats, and 0, 1, `yes` and `no` for booleans.",
    "shapes": "A wrong shape is always refused. SGLang on a CPU cuts or pads what belongs to a "
    "fused or row-parallel layer (`q_proj`, `gate_proj`, `down_proj`, ...) and answers 200: the "
    "model is garbage.",
    "fused names": "Names of fused layers (`gate_up_proj`, `qkv_proj`) are unknown; SGLang's Llama "
    "loads them.",
    "other routes": "`/update_weights_from_ipc`, adapters and the OpenAI routes are not there.",
    "checker": "`/weights_checker` computes checksums only.",
}


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    ``reads`` are the dotted paths of the answer that are compared, or all of it if empty;
    ``says`` are words that are looked for in the answer instead.
    """

    method: str
    path: str
    body: Any = None
    reads: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    raw: str | None = None
    differs: str = ""


@dataclass(frozen=True)
class Generate:
    """A greedy request, to its end: its tokens, its versions, and how much came from the cache."""

    prompt: tuple[int, ...] = PROMPT
    count: int = 8
    differs: str = ""


@dataclass(frozen=True)
class Start:
    """A greedy request that goes on while the next steps run, longer than any of them takes."""

    name: str = "long"
    until: Literal["running", "sent"] = "running"
    prompt: tuple[int, ...] = (7, 21, 40)
    count: int = 1500
    differs: str = ""


@dataclass(frozen=True)
class Grow:
    """Waits until the running request has made some tokens more."""

    differs: str = ""


@dataclass(frozen=True)
class Finish:
    """The end of a started request: why it ended, under which versions, on whose weights.

    With ``cut`` it is aborted now, unless it has ended. A ``raced`` one tells of its first
    version alone: an abort that comes with a new label may be a token late.
    """

    name: str = "long"
    cut: bool = True
    raced: bool = False
    differs: str = ""


@dataclass(frozen=True)
class IsDone:
    """Whether a started request has its answer already; one that is expected is waited for."""

    name: str = "long"
    expected: bool = False
    differs: str = ""


@dataclass(frozen=True)
class Push:
    """An update request, and the broadcast that it announces.

    ``names`` selects parameters of a model; ``zeros`` adds tensors of other names or shapes;
    ``fields`` are set in the request.
    """

    model: Literal["a", "b"] = "b"
    names: tuple[str, ...] | None = None
    zeros: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cast: str | None = None
    flat: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    differs: str = ""


@dataclass(frozen=True)
class Join:
    """Makes a second group, both ends."""

    differs: str = ""


Step = Call | Generate | Start | Grow | Finish | IsDone | Push | Join


@dataclass(frozen=True)
class Case:
    """Steps that begin on model A, idle, not paused, outside a session, under ``default``."""

    name: str
    steps: tuple[Step, ...]


def get(path: str, *reads: str, **more: Any) -> Call:
    """A GET."""
    return Call("GET", path, reads=reads, **more)


def post(path: str, body: Any = None, *reads: str, **more: Any) -> Call:
    """A POST of JSON."""
    return Call("POST", path, body, reads, **more)


def announce(says: tuple[str, ...] = (), differs: str = "", **fields: Any) -> Call:
    """An update request without a broadcast: the engine must refuse it before it joins."""
    body = {
        "names": [NORM],
        "dtypes": ["float32"],
        "shapes": [[64]],
        "group_name": GROUP,
        "flush_cache": False,
        **fields,
    }
    body = {key: value for key, value in body.items() if value is not ...}
    return Call("POST", UPDATE, body, says=says, differs=differs)


def generate(body: dict[str, Any], *reads: str, **more: Any) -> Call:
    """A request to generate, written out."""
    return Call("POST", "/generate", body, reads, **more)


UPDATE = "/update_weights_from_distributed"
BEGIN = post("/begin_weight_update", {})
END = post("/end_weight_update", {})
FLUSHED = ("Cache flushed.", "Flush cache failed.", "Timed out waiting for idle state.")
FLUSH = post("/flush_cache", says=FLUSHED)
CONTINUE = post("/continue_generation", {})
LABEL = get("/model_info", "weight_version")
LOADS = get("/v1/loads", "loads.0.num_running_reqs", "loads.0.num_waiting_reqs")

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
REFUSED = ('{"error":{"message":',)  # in words that are each engine's own
TOKENS = ("output_ids", "text", "meta_info.finish_reason", "meta_info.completion_tokens")


def pause(mode: str) -> Call:
    """A pause."""
    return post("/pause_generation", {"mode": mode})


def after(mode: str) -> tuple[Step, ...]:
    """What becomes of the running request once a pause is over."""
    return (Finish(cut=False),) if mode == "abort" else (Grow(), Finish())


def session(*steps: Step) -> tuple[Step, ...]:
    """Steps inside an update session."""
    return (BEGIN, *steps, END)


def greedy(**fields: Any) -> dict[str, Any]:
    """The body of a greedy request with other fields or sampling parameters."""
    params = {**GREEDY, **fields.pop("sampling_params", {})}
    return {"input_ids": list(PROMPT), "sampling_params": params, **fields}


def sampled(**params: Any) -> dict[str, Any]:
    """The body of a greedy request with these sampling parameters changed."""
    return greedy(sampling_params=params)


INFORMATION = (
    Case(
        "model_info",
        (
            get(
                "/model_info",
                "model_path",
                "served_model_name",
                "tokenizer_path",
                "is_generation",
                "preferred_sampling_params",
                "weight_version",
                "load_format",
                "model_type",
                "architectures",
            ),
        ),
    ),
    Case("get_model_info", (get("/get_model_info", "weight_version", "model_path"),)),
    *(
        Case(
            path.strip("/"),
            (
                get(
                    path,
                    *("version", "tp_size", "pp_size", "dp_size", "ep_size", "attn_dp_size"),
                    *("enable_dp_attention", "weight_version", "model_path", "api_key"),
                    *("admin_api_key", "host", "dtype", "device", "disaggregation_mode"),
                ),
            ),
        )
        for path in ("/server_info", "/get_server_info")
    ),
    Case("loads of an idle server", (LOADS, get("/v1/loads", "loads.0.dp_rank"))),
    Case("loads by rank", (get("/v1/loads?dp_rank=0", "loads.0.num_running_reqs"),)),
    Case(
        "queues",
        (get("/v1/loads?include=queues", "loads.0.queues.waiting", "loads.0.queues.paused"),),
    ),
    *(Case(path, (get(path),)) for path in ("/ping", "/ready", "/health", "/health_generate")),
    Case("routes that are gone", (get("/get_load"), get("/get_weight_version"))),
    Case("an unknown route", (get("/no_such_route"), post("/no_such_route", {}))),
    Case(
        "the wrong method",
        (
            get("/pause_generation"),
            get("/begin_weight_update"),
            get(UPDATE),
            post("/model_info", {}),
            post("/server_info", {}),
            post("/v1/loads", {}),
            Call("DELETE", "/generate"),
        ),
    ),
    Case(
        "probes by OPTIONS",
        tuple(
            Call("OPTIONS", path)
            for path in (
                "/pause_generation",
                "/begin_weight_update",
                "/model_info",
                "/v1/loads",
                "/get_load",
                "/flush_cache",
                "/generate",
            )
        ),
    ),
    Case(
        "openapi",
        (
            get(
                "/openapi.json",
                "components.schemas.UpdateWeightsFromDistributedReqInput.required",
                "components.schemas.InitWeightsUpdateGroupReqInput.required",
                "components.schemas.UpdateWeightVersionReqInput.required",
            ),
        ),
    ),
)

GENERATION = (
    Case("greedy", (Generate(), Generate(count=24))),
    Case("a cached prefix", (Generate(), Generate(), Generate((*PROMPT, 5)))),
    Case("tokens and text", (generate(greedy(), *TOKENS, "meta_info.prompt_tokens"),)),
    Case("text", (generate({"text": "w5 w6 w7", "sampling_params": GREEDY}, *TOKENS),)),
    Case(
        "a batch of prompts",
        (
            generate(
                greedy(input_ids=[[5, 6], [7], [9, 10, 11]]),
                *(f"{i}.{key}" for i in range(3) for key in TOKENS),
            ),
        ),
    ),
    Case(
        "a batch of texts",
        (
            generate(
                {"text": ["w5 w6", "w7"], "sampling_params": GREEDY},
                *(f"{i}.{key}" for i in range(2) for key in TOKENS),
            ),
        ),
    ),
    Case(
        "a batch with parameters of its own for each",
        (
            generate(
                {
                    "input_ids": [[5, 6], [7]],
                    "sampling_params": [GREEDY, {**GREEDY, "max_new_tokens": 3}],
                    "rid": ["first", "second"],
                },
                *(f"{i}.{key}" for i in range(2) for key in (*TOKENS, "meta_info.id")),
            ),
        ),
    ),
    Case(
        "a batch with one rid", (generate(greedy(input_ids=[[5], [6]], rid="r"), "0.output_ids"),)
    ),
    Case("a batch of one", (generate(greedy(input_ids=[[5, 6]]), "0.output_ids"),)),
    Case("an id", (generate(greedy(rid="mine"), "meta_info.id"),)),
    Case(
        "logprobs",
        (
            generate(
                greedy(return_logprob=True),
                "output_ids",
                *(f"meta_info.output_token_logprobs.{i}" for i in range(6)),
            ),
        ),
    ),
    Case(
        "prefixes under an extra key",
        tuple(
            generate(greedy(extra_key=key), "meta_info.cached_tokens")
            for key in ("one", "one", "another", "one")
        ),
    ),
    Case(
        "versions and counts",
        (
            generate(
                greedy(),
                "meta_info.weight_version",
                "meta_info.weight_versions",
                "meta_info.num_retractions",
                "meta_info.cached_tokens",
            ),
        ),
    ),
    Case(
        "a stop token",
        (
            generate(sampled(stop_token_ids=[68, 139], ignore_eos=False), *TOKENS),
            generate(sampled(stop_token_ids=[68, 139], max_new_tokens=8), *TOKENS),
        ),
    ),
    Case("an end token", (generate(sampled(ignore_eos=False, max_new_tokens=20), *TOKENS),)),
    Case("no tokens wanted", (generate(sampled(max_new_tokens=0), *TOKENS),)),
    Case("one token wanted", (generate(sampled(max_new_tokens=1), *TOKENS),)),
    Case(
        "as many tokens as fit",
        (
            generate(
                greedy(input_ids=[5] * (CONTEXT - 8), sampling_params={"max_new_tokens": None}),
                "meta_info.finish_reason",
                "meta_info.completion_tokens",
            ),
        ),
    ),
    Case("top_p is neutral under greedy", (generate(sampled(top_p=0.5), *TOKENS),)),
    Case(
        "the default length",
        (
            generate(
                {"input_ids": list(PROMPT), "sampling_params": {"ignore_eos": True}},
                "meta_info.prompt_tokens",
                "meta_info.completion_tokens",
            ),
        ),
    ),
    Case(
        "prompts that do not fit",
        (
            generate(greedy(input_ids=[]), says=REFUSED),
            generate(greedy(input_ids=[5] * CONTEXT), says=REFUSED),
            generate(greedy(input_ids=[5] * (CONTEXT - 1)), says=REFUSED),
            generate(greedy(input_ids=None), says=REFUSED),
            generate(greedy(input_ids="5")),
            generate(greedy(input_ids=["5"])),
            generate({}, says=REFUSED),
        ),
    ),
    Case(
        "sampling parameters out of range",
        tuple(
            generate(sampled(**{name: value}), says=REFUSED)
            for name, value in (
                ("temperature", -1),
                ("top_p", 0),
                ("top_p", 1.5),
                ("max_new_tokens", -1),
                ("min_p", 2),
                ("frequency_penalty", 3),
                ("repetition_penalty", 0),
            )
        ),
    ),
    Case(
        "sampling parameters of the wrong kind",
        (
            generate(sampled(temperature="hot"), says=('{"error":',)),
            generate(sampled(max_new_tokens="8"), says=('{"error":',)),
            generate(sampled(no_such_parameter=1), says=('{"error":',)),
            generate(greedy() | {"sampling_params": 5}),
        ),
    ),
    Case(
        "a list of parameters for one prompt",
        (generate(greedy() | {"sampling_params": [GREEDY]}, differs="list for one prompt"),),
    ),
    Case(
        "bodies that are no JSON",
        (
            Call("POST", "/generate", raw="{"),
            Call("POST", "/generate", raw="[]"),
            Call("POST", "/generate", raw=""),
            Call("PUT", "/generate", greedy(), TOKENS),
        ),
    ),
    Case("more samples", (generate(sampled(n=2), "0.output_ids", differs="sampling"),)),
    Case(
        "a stop string",
        (generate(sampled(stop=["w7"], max_new_tokens=20), *TOKENS, differs="sampling"),),
    ),
    Case("streamed", (generate(greedy(stream=True), says=("data: [DONE]",), differs="stream"),)),
)

ABORTS = (
    Case(
        "aborts that hit nothing",
        (
            post("/abort_request", {"rid": "nobody"}),
            post("/abort_request", {}),
            post("/abort_request", {"rid": ""}),
            post("/abort_request", {"abort_all": True}),
            post("/abort_request", {"rid": 5}),
        ),
    ),
    Case(
        "a running request", (Start(), post("/abort_request", {"rid": "long"}), Finish(cut=False))
    ),
    Case(
        "by the start of its id, which is not enough",
        (Start(count=60), post("/abort_request", {"rid": "lo"}), Finish(cut=False)),
    ),
    Case(
        "with those whose ids start with its own",
        (
            Start(),
            Start("longer"),
            post("/abort_request", {"rid": "long"}),
            Finish(cut=False),
            Finish("longer", cut=False),
        ),
    ),
    Case("all of them", (Start(), post("/abort_request", {"abort_all": True}), Finish(cut=False))),
    Case("another one", (Start(count=60), post("/abort_request", {"rid": "x"}), Finish(cut=False))),
    Case(
        "a held one goes on",
        (
            pause("retract"),
            Start(until="sent", count=8),
            post("/abort_request", {"rid": "long"}),
            post("/abort_request", {"abort_all": True}),
            CONTINUE,
            Finish(cut=False),
        ),
    ),
    Case(
        "a retracted one",
        (
            Start(),
            pause("retract"),
            post("/abort_request", {"rid": "long"}),
            CONTINUE,
            Finish(cut=False),
        ),
    ),
    Case(
        "a frozen one ends when it may go on",
        (
            Start(),
            pause("in_place"),
            post("/abort_request", {"rid": "long"}),
            IsDone(),
            CONTINUE,
            Finish(cut=False),
        ),
    ),
)

PAUSES = (
    *(
        Case(f"{mode}, twice, and continue twice", (pause(mode), pause(mode), CONTINUE, CONTINUE))
        for mode in ("abort", "retract", "in_place")
    ),
    Case("continue without a pause", (CONTINUE, Generate())),
    Case(
        "the default is abort",
        (Start(), post("/pause_generation", {}), Finish(cut=False), CONTINUE),
    ),
    Case(
        "modes that are none",
        (
            post("/pause_generation", {"mode": "stop"}, says=("validation error",)),
            post("/pause_generation", {"mode": None}, says=("validation error",)),
            post("/pause_generation", {"mode": 1}, says=("validation error",)),
            Call("POST", "/pause_generation", raw="", says=("validation error",)),
            Call("POST", "/pause_generation", raw="nonsense", says=("validation error",)),
            Call("POST", "/continue_generation", raw="", says=("validation error",)),
            get("/ready"),
        ),
    ),
    Case("unknown fields", (post("/pause_generation", {"mode": "abort", "x": 1}), CONTINUE)),
    *(
        Case(
            f"{mode} with a request running",
            (
                Start(),
                pause(mode),
                get("/ready"),
                LOADS,
                FLUSH,
                CONTINUE,
                *after(mode),
                get("/ready"),
            ),
        )
        for mode in ("abort", "retract", "in_place")
    ),
    *(
        Case(
            f"{mode} holds new requests",
            (pause(mode), Start(until="sent", count=8), IsDone(), CONTINUE, Finish(cut=False)),
        )
        for mode in ("abort", "retract", "in_place")
    ),
    Case(
        "one mode after another",
        (Start(), pause("in_place"), pause("retract"), FLUSH, CONTINUE, Grow(), Finish()),
    ),
    Case(
        "retract, then abort",
        (Start(), pause("retract"), pause("abort"), Finish(cut=False), CONTINUE),
    ),
    Case(
        "what answers while paused",
        (pause("retract"), get("/ping"), LABEL, get("/server_info", "version"), CONTINUE),
    ),
)

FLUSHES = (
    Case(
        "an idle one",
        (
            FLUSH,
            get("/flush_cache", says=FLUSHED),
            post("/flush_cache?timeout=1", says=FLUSHED),
        ),
    ),
    Case(
        "a timeout that is none",
        (
            post("/flush_cache?timeout=-1", says=("validation error",)),
            post("/flush_cache?timeout=soon", says=("validation error",)),
        ),
    ),
    Case("a busy one", (Start(), FLUSH, post("/flush_cache?timeout=0.2", says=FLUSHED), Finish())),
    Case(
        "a timeout counts the queue, no timeout does not",
        (
            Start(),
            pause("retract"),
            post("/flush_cache?timeout=0.2", says=FLUSHED),
            FLUSH,
            CONTINUE,
            Grow(),
            Finish(),
        ),
    ),
    Case("it empties the cache", (Generate(), Generate(), FLUSH, Generate())),
)

GROUPS = (
    Case(
        "a live name again",
        (
            post(
                "/init_weights_update_group",
                {
                    "master_address": "127.0.0.1",
                    "master_port": PORT,
                    "rank_offset": 1,
                    "world_size": 2,
                    "group_name": GROUP,
                    "backend": "gloo",
                },
            ),
        ),
    ),
    Case(
        "missing fields",
        (
            post("/init_weights_update_group", {}, says=("validation errors", "master_address")),
            post(
                "/init_weights_update_group",
                {"master_address": "127.0.0.1", "master_port": "x", "rank_offset": 1},
                says=("validation errors", "master_port", "world_size"),
            ),
            Call("POST", "/init_weights_update_group", raw="", says=("validation error",)),
        ),
    ),
    Case(
        "a second group, used and destroyed twice",
        (
            Join(),
            BEGIN,
            Push(fields={"group_name": OTHER}),
            END,
            post("/destroy_weights_update_group", {"group_name": OTHER}),
            post("/destroy_weights_update_group", {"group_name": OTHER}),
            FLUSH,
            Generate(),
        ),
    ),
    Case(
        "groups that do not exist",
        (
            post("/destroy_weights_update_group", {"group_name": "nobody"}),
            post("/destroy_weights_update_group", {}),
        ),
    ),
)

SESSIONS = (
    Case("begin twice", (BEGIN, BEGIN, END)),
    Case("end without begin", (END,)),
    Case("end twice", (BEGIN, END, END)),
    Case(
        "selectors",
        (
            post("/begin_weight_update", {"selector": "target"}),
            END,
            post("/begin_weight_update", {"selector": "draft"}),
            END,
            post("/begin_weight_update", {"selector": "x"}, says=("validation error",)),
            END,
        ),
    ),
    Case(
        "no body",
        (
            Call("POST", "/begin_weight_update", raw="", says=("validation error",)),
            Call("POST", "/end_weight_update", raw="", says=("validation error",)),
        ),
    ),
    Case("an update outside", (announce(), Generate())),
    Case("a bucket outside", (announce(load_format="flattened_bucket"), Generate())),
    Case(
        "begin without a pause waits for what runs",
        (Start(count=60), BEGIN, IsDone(expected=True), END, Finish(cut=False)),
    ),
    Case("an open one does not keep requests out", (BEGIN, Generate(), END)),
    Case("a pause does not end it", (BEGIN, pause("retract"), CONTINUE, BEGIN, END)),
)


def update_under(mode: str, *, flush: bool) -> Case:
    """A whole update under a pause with a request in flight, then a request of its own prompt."""
    return Case(
        f"under {mode}, flush_cache={flush}",
        (
            Generate(),
            Start(),
            pause(mode),
            BEGIN,
            Push(fields={"flush_cache": flush, "weight_version": "7"}),
            END,
            LABEL,
            CONTINUE,
            *after(mode),
            Generate(),
            LABEL,
        ),
    )


UPDATES = (
    *(
        update_under(mode, flush=f)
        for mode in ("abort", "retract", "in_place")
        for f in (False, True)
    ),
    *(
        Case(f"{name}, then a flush", (*session(Push(flat=flat)), FLUSH, Generate()))
        for name, flat in (("one broadcast a name", False), ("a flattened bucket", True))
    ),
    Case(
        "flushed by itself", (Generate(), *session(Push(fields={"flush_cache": True})), Generate())
    ),
    Case(
        "flush_cache is true by default",
        (Generate(), *session(Push(fields={"flush_cache": ...})), Generate()),
    ),
    Case("a stale prefix", (Generate(), *session(Push()), Generate(), FLUSH, Generate())),
    Case(
        "without a pause it waits for what runs",
        (BEGIN, Start(count=60), Push(), IsDone(expected=True), END, Finish(cut=False)),
    ),
    Case(
        "abort_all_requests ends what runs",
        (BEGIN, Start(), Push(fields={"abort_all_requests": True}), END, Finish(cut=False), LABEL),
    ),
    Case("a version", (*session(Push(fields={"weight_version": "9"})), LABEL, FLUSH, Generate())),
    Case("an empty version", (*session(Push(fields={"weight_version": ""})), LABEL)),
    Case(
        "two parts",
        (
            *session(Push(names=(NORM, GATE)), Push(names=(HEAD, DOWN), flat=True)),
            FLUSH,
            Generate(),
        ),
    ),
    Case("nothing at all", (*session(Push(names=())), Generate())),
    Case(
        "an unknown load format is none",
        (*session(Push(fields={"load_format": "x"})), FLUSH, Generate()),
    ),
    Case(
        "torch_empty_cache", session(Push(fields={"torch_empty_cache": True, "flush_cache": True}))
    ),
    Case("the target only", (*session(Push(fields={"selector": "target"})), FLUSH, Generate())),
    Case("a tensor twice", (*session(Push(names=(NORM, NORM))), FLUSH, Generate())),
    *(
        Case(
            f"bf16 into fp32, flat={flat}",
            (*session(Push(cast="bfloat16", flat=flat)), FLUSH, Generate()),
        )
        for flat in (False, True)
    ),
    Case("float64 into fp32", (*session(Push(cast="float64")), FLUSH, Generate())),
)

WRONG_UPDATES = (
    *(
        Case(
            f"an unknown name, flat={flat}",
            (
                *session(Push(names=(NORM,), zeros={"model.nothing.weight": (2,)}, flat=flat)),
                FLUSH,
                Generate(),
            ),
        )
        for flat in (False, True)
    ),
    Case(
        "a rotary table",
        (
            *session(Push(names=(), zeros={"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)})),
            Generate(),
        ),
    ),
    Case(
        "a bias that the model lacks",
        (
            *session(Push(names=(), zeros={"model.layers.0.self_attn.q_proj.bias": (64,)})),
            Generate(),
        ),
    ),
    *(
        Case(
            f"a wrong shape {list(shape)} of {name}",
            (
                *session(
                    Push(
                        names=(HEAD,),
                        zeros={name: shape},
                        says=(
                            "Failed to update parameter online",
                            "partially updated. Please discard the whole weights",
                        ),
                    )
                ),
                FLUSH,
                Generate(),
            ),
        )
        for name, shape in (
            (NORM, (3,)),
            (NORM, (64, 1)),
            ("model.embed_tokens.weight", (10, 64)),
        )
    ),
    Case(
        "a session takes more after a partial update",
        (
            *session(
                Push(names=(), zeros={NORM: (3,)}, says=("partially updated",)), Push(names=(HEAD,))
            ),
            FLUSH,
            Generate(),
        ),
    ),
    *(
        Case(
            f"a wrong shape {list(shape)} of {name}",
            (
                BEGIN,
                Push(
                    names=(),
                    zeros={name: shape},
                    says=("partially updated",),
                    differs="shapes",
                ),
                END,
                FLUSH,
                Generate(differs="shapes"),
            ),
        )
        for name, shape in (
            (DOWN, (64, 64)),
            (GATE, (64, 64)),
            (GATE, (200, 64)),
            ("model.layers.0.self_attn.q_proj.weight", (32, 64)),
        )
    ),
    Case(
        "a fused name",
        (
            *session(Push(names=(), zeros={"model.layers.0.mlp.gate_up_proj.weight": (256, 64)})),
            FLUSH,
            Generate(differs="fused names"),
        ),
    ),
    *(
        Case(
            f"dtype {dtype!r}",
            (*session(announce(dtypes=[dtype])), *session(Push()), FLUSH, Generate()),
        )
        for dtype in ("torch.float32", "nonsense", "", "float99")
    ),
    Case(
        "a dtype that is another thing of torch's",
        (
            *session(announce(dtypes=["Tensor"], says=("Failed to receive weights",))),
            *session(Push()),
            FLUSH,
            Generate(),
        ),
    ),
    Case(
        "a negative size",
        session(announce(shapes=[[-1]], says=("Failed to receive weights",)), Push()),
    ),
    Case(
        "an unknown group",
        (
            *session(
                announce(
                    group_name="nobody",
                    says=("Failed to receive weights: Group nobody not in [",),
                )
            ),
            *session(Push()),
            FLUSH,
            Generate(),
        ),
    ),
    Case(
        "two names, one shape",
        (*session(Push(names=(NORM,), fields={"names": [NORM, HEAD]})), FLUSH, Generate()),
    ),
    *(
        Case(
            f"{name} missing",
            session(announce(**{name: ...}, says=("validation error", name)), Push()),
        )
        for name in ("names", "dtypes", "shapes")
    ),
    # Outside a session, so that what is taken is refused a step later and nobody joins.
    Case(
        "fields of the wrong kind",
        (
            announce(names=NORM, says=("validation error", "names")),
            announce(shapes=[64], says=("validation error", "shapes")),
            announce(shapes=[[64.5]], says=("validation error", "shapes")),
            announce(shapes=[["wide"]], says=("validation error", "shapes")),
            announce(flush_cache="perhaps", says=("validation error", "flush_cache")),
            announce(flush_cache=2, says=("validation error", "flush_cache")),
            announce(selector="x", says=("validation error", "selector")),
            announce(group_name=None, says=("validation error", "group_name")),
            announce(weight_version=9, says=("validation error", "weight_version")),
            Call("POST", UPDATE, raw="", says=("validation error",)),
        ),
    ),
    Case(
        "fields of a kind that can be turned into the right one",
        (
            announce(shapes=[["64"]], differs="lenient"),
            announce(shapes=[[64.0]], differs="lenient"),
            announce(flush_cache=0, differs="lenient"),
            announce(flush_cache="yes", differs="lenient"),
        ),
    ),
    Case(
        "a bucket with lists of unequal length",
        session(
            announce(
                names=[NORM, HEAD],
                load_format="flattened_bucket",
                says=("Failed to receive weights",),
            ),
            Push(flat=True),
        ),
    ),
    Case(
        "a bucket of nothing",
        session(
            announce(
                names=[],
                dtypes=[],
                shapes=[],
                load_format="flattened_bucket",
                says=("Failed to receive weights",),
            ),
            Push(flat=True),
        ),
    ),
    Case(
        "a bucket whose offsets do not fit",
        session(
            announce(
                names=["a", "b"],
                dtypes=["uint8", "float32"],
                shapes=[[1], [1]],
                load_format="flattened_bucket",
                says=("Failed to receive weights",),
            ),
            Push(flat=True),
        ),
    ),
    Case(
        "a bucket with a dtype that is none",
        session(
            announce(dtypes=["torch.float32"], load_format="flattened_bucket"), Push(flat=True)
        ),
    ),
    Case(
        "a refused update keeps its version to itself",
        (*session(announce(dtypes=["nonsense"], weight_version="8")), LABEL),
    ),
    Case(
        "a partial update keeps its version to itself",
        (
            *session(
                Push(
                    names=(),
                    zeros={NORM: (3,)},
                    fields={"weight_version": "8"},
                    says=("partially",),
                )
            ),
            LABEL,
            generate(greedy(), "meta_info.weight_version"),
        ),
    ),
    Case(
        "a session stays open after a refusal", (BEGIN, announce(dtypes=["nonsense"]), BEGIN, END)
    ),
)

VERSIONS = (
    Case(
        "a version",
        (
            post("/update_weight_version", {"new_version": "5", "abort_all_requests": False}),
            LABEL,
            get("/server_info", "weight_version"),
            Generate(),
        ),
    ),
    Case(
        "it does not abort when told not to",
        (
            Start(),
            Grow(),
            post("/update_weight_version", {"new_version": "5", "abort_all_requests": False}),
            Grow(),
            Finish(),
        ),
    ),
    Case(
        "it aborts by default",
        (
            Start(),
            post("/update_weight_version", {"new_version": "5"}),
            Finish(cut=False, raced=True),
            LABEL,
        ),
    ),
    Case(
        "while paused",
        (
            Start(),
            pause("in_place"),
            post("/update_weight_version", {"new_version": "5", "abort_all_requests": False}),
            CONTINUE,
            Grow(),
            Finish(),
        ),
    ),
    Case(
        "versions that are none",
        (
            post("/update_weight_version", {}, says=("validation error", "new_version")),
            post("/update_weight_version", {"new_version": 5}, says=("validation error",)),
            post("/update_weight_version", {"new_version": None}, says=("validation error",)),
            post("/update_weight_version", {"new_version": ""}),
            LABEL,
        ),
    ),
)

WEIGHTS = (
    *(
        Case(f"{name} by name", (post("/get_weights_by_name", {"name": name, "truncate_size": 2}),))
        for name in (
            NORM,
            HEAD,
            "model.embed_tokens.weight",
            DOWN,
            GATE,
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.v_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.input_layernorm.weight",
        )
    ),
    Case("100 rows by default", (post("/get_weights_by_name", {"name": HEAD}),)),
    Case(
        "asked by GET", (Call("GET", "/get_weights_by_name", {"name": NORM, "truncate_size": 1}),)
    ),
    Case(
        "names that are none",
        (
            post("/get_weights_by_name", {"name": "model.nothing.weight"}),
            post("/get_weights_by_name", {}, says=("validation error", "name")),
            post("/get_weights_by_name", {"name": 5}, says=("validation error",)),
        ),
    ),
    Case(
        "after an update",
        (*session(Push()), post("/get_weights_by_name", {"name": GATE, "truncate_size": 2})),
    ),
    Case(
        "the checker",
        (
            post("/weights_checker", {"action": "checksum"}, "success", "message"),
            Call("GET", "/weights_checker", reads=("success", "message")),
            post("/weights_checker", {}, "success", "message"),
            post("/weights_checker", {"action": "nonsense"}, says=('"success":false',)),
        ),
    ),
    Case(
        "other actions of the checker",
        (post("/weights_checker", {"action": "snapshot"}, differs="checker"),),
    ),
)

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
WRONG_FIELDS = ("validation error",)
MEMORY = (
    Case(
        "without a saver, everything works on",
        (
            Generate(),
            post(RELEASE, {"tags": ["weights", "kv_cache", "cuda_graph"]}),
            Generate(),
            post(RELEASE, {"tags": ["kv_cache"]}),
            post(RESUME, {"tags": ["weights"]}),
            post(RESUME, {"tags": ["kv_cache", "cuda_graph"]}),
            Generate(),
        ),
    ),
    Case("no tags mean all", (post(RELEASE, {}), post(RESUME, {"tags": []}))),
    Case("unknown tags", (post(RELEASE, {"tags": ["x"]}), post(RESUME, {"tags": ["x"]}))),
    Case(
        "what is no list of tags",
        (
            post(RELEASE, {"tags": "weights"}, says=WRONG_FIELDS),
            post(RESUME, {"tags": 5}, says=WRONG_FIELDS),
            post(RELEASE, says=WRONG_FIELDS),
        ),
    ),
    Case(
        "under retract, with a queue",
        (
            Start(),
            post("/pause_generation", {"mode": "retract"}),
            post(RELEASE, {}),
            post(RESUME, {}),
            post("/continue_generation", {}),
            Grow(),
            Finish(),
        ),
    ),
)

NO_FOLDER = ("false", "Failed to get weights iterator")
OTHERS = (
    Case(
        "other ways in for weights",
        (
            post("/update_weights_from_disk", {"model_path": "/nowhere"}, says=NO_FOLDER),
            post("/update_weights_from_tensor", {}),
            post("/update_weights_from_ipc", {}, differs="other routes"),
        ),
    ),
    Case("adapters", (post("/load_lora_adapter", {}, differs="other routes"),)),
    Case("OpenAI", (get("/v1/models", "object", differs="other routes"),)),
)

SECTIONS: dict[str, tuple[Case, ...]] = {
    "information": INFORMATION,
    "generation": GENERATION,
    "aborts": ABORTS,
    "pauses": PAUSES,
    "flushes": FLUSHES,
    "groups": GROUPS,
    "sessions": SESSIONS,
    "updates": UPDATES,
    "wrong updates": WRONG_UPDATES,
    "versions": VERSIONS,
    "weights": WEIGHTS,
    "memory": MEMORY,
    "others": OTHERS,
}

CASES: dict[str, Case] = {
    f"{section}: {case.name}": case for section, cases in SECTIONS.items() for case in cases
}

KILLS = "it ends the process"
WAITS = "nothing refuses it, and it waits for a broadcast that never comes"
#: What older releases are not asked, with the reason.
LEFT_OUT = {
    "updates: under retract, flush_cache=True": KILLS,
    "updates: under in_place, flush_cache=True": KILLS,
    "wrong updates: an unknown group": KILLS,
    "memory: under retract, with a queue": KILLS,
    "sessions: an update outside": WAITS,
    "sessions: a bucket outside": WAITS,
    "wrong updates: fields of the wrong kind": WAITS,
    "wrong updates: fields of a kind that can be turned into the right one": WAITS,
    "wrong updates: a bucket with lists of unequal length": WAITS,
    "wrong updates: a bucket whose offsets do not fit": WAITS,
}
INFORMATION_OF_OLDER = {
    "`/model_info` also shows `served_model_name` and `load_format`, which SGLang's does not.": {
        "information: model_info": (0,)
    },
    "`/get_weight_version` is not there; SGLang's 404 says what to ask instead.": {
        "information: routes that are gone": (1,)
    },
    "`/server_info` shows the `weight_version` of the start; SGLang shows the present one.": {
        "versions: a version": (2,)
    },
}
GENERATION_OF_OLDER = {
    "A stop token in the last place ends a request as `stop`; SGLang says `length` and shows it.": {
        "generation: a stop token": (0,)
    },
    "Sampling parameters of the wrong kind, or unknown, are a 400; SGLang answers 500.": {
        "generation: sampling parameters of the wrong kind": (0, 1, 2)
    },
}

#: The older releases that the table is played to: what differs beside the steps that are marked
#: in the table, in the words of the reference engine's README, and the numbers of those steps.
OLDER: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {
    "0.5.15.post1": {
        **INFORMATION_OF_OLDER,
        "`/get_load` has no `num_pending_tokens`.": {"information: routes that are gone": (0,)},
        **GENERATION_OF_OLDER,
        "`/weights_checker` works on a CPU; SGLang's asks for CUDA, and answers 400 without.": {
            "weights: the checker": (0, 1, 2)
        },
    },
    "0.5.9": {
        **INFORMATION_OF_OLDER,
        "`/get_load` shows a `dp_rank` of 0; SGLang shows none.": {
            "information: routes that are gone": (0,)
        },
        "`/v1/loads` shows a `dp_rank`, and ignores one that is asked for; SGLang shows none, and "
        "finds none.": {
            "information: loads of an idle server": (1,),
            "information: loads by rank": (0,),
        },
        **GENERATION_OF_OLDER,
        "Token ids as text are refused, and so is a `repetition_penalty` of 0; SGLang takes "
        "both.": {
            "generation: prompts that do not fit": (5,),
            "generation: sampling parameters out of range": (6,),
        },
        "`extra_key` keeps prefixes apart; SGLang's scheduler drops it, and they are shared.": {
            "generation: prefixes under an extra key": (2,)
        },
    },
}
