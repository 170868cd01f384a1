"""
Push a model into a live server
===============================

Reinforcement learning of a language model has two sides: a trainer that changes the weights,
and an inference server that samples with them. After every few steps the server needs the
trainer's weights, while it is busy with requests. This tutorial moves weights into a running
server and looks at what becomes of those requests.

What you will learn:

- how to push a model with one call, and what its report says;
- what each pause mode does to a request that is running during the push;
- why a cache of prefixes can outlive the weights that filled it, and why ``retract`` is the
  default;
- how to update several servers at once;
- what a failed push looks like, and how it heals.

Everything runs on a CPU in less than a minute. Every statement about the server's output is
checked by an ``assert``. You need ``pip install ".[demo]"`` from a clone.
"""

######################################################################
# Two models and a server
# -----------------------
#
# Model A is what the server starts with. Model B stands for the result of training. Both are
# tiny Llamas with random weights, so that their outputs have nothing in common.

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weight_update import EngineState, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine

as_written = argparse.RawDescriptionHelpFormatter
argparse.ArgumentParser(description=__doc__, formatter_class=as_written).parse_args()

torch.set_num_threads(1)  # leave the other cores to the server


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


model_a, model_b = tiny_llama(seed=0), tiny_llama(seed=1)

######################################################################
# The server is a :class:`~weight_update.reference_engine.ReferenceEngine`: a small stand-in for
# SGLang, in a process of its own. It speaks the same HTTP routes and joins a real process group.
# A real SGLang server is updated with the same calls; only starting and asking it differ.

engine = ReferenceEngine(model_a)

######################################################################
# To know what a server *should* say, ask transformers. ``greedy`` is what a model generates, and
# ``own_choice`` is the share of some tokens that the model would have chosen itself, each after
# the tokens before it.

PROMPT = [5, 9, 17, 33, 2, 40, 41, 8]


def greedy(model: LlamaForCausalLM, count: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


@torch.no_grad()
def own_choice(model: LlamaForCausalLM, tokens: list[int], start: int, stop: int) -> float:
    before = len(PROMPT) + start
    sequence = torch.tensor([PROMPT + tokens[:stop]])
    chosen = model(sequence).logits[0, before - 1 : -1].argmax(-1)
    return (chosen == sequence[0, before:]).float().mean().item()


def served(server: ReferenceEngine, count: int = 16) -> list[int]:
    return server.generate(PROMPT, max_new_tokens=count)["output_ids"]


a_says, b_says = greedy(model_a, 16), greedy(model_b, 16)
print(f"A says      {a_says}\nB says      {b_says}\nserver says {served(engine)}")
assert a_says != b_says
assert served(engine) == a_says

######################################################################
# The one call
# ------------
#
# A *scheme* holds the settings, and its *sender* does the work. ``update_weights()`` makes the
# process group when it runs for the first time. When it returns, the server generates with the
# new weights.

scheme = SGLangWeightSyncScheme(engine.url)
sender = scheme.create_sender()
sender.register_model(model_b)

report = sender.update_weights()

assert served(engine) == b_says

######################################################################
# What the report says
# --------------------
#
# The report has the version that the server now serves, what was sent, how long each phase took,
# and one line for each server.

print(report)

######################################################################
# ``paused`` is the time during which the server could not generate, and ``connect`` is paid once.
# The version is also a label on the server, so every answer says which weights made it.

print({phase: f"{1e3 * seconds:.1f} ms" for phase, seconds in report.seconds.items()})
assert report.engines[engine.url].state is EngineState.NEW
assert report.seconds["paused"] < report.seconds["total"]
meta = engine.generate(PROMPT, max_new_tokens=4)["meta_info"]
assert meta["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 4}]

######################################################################
# Pause modes
# -----------
#
# Weights must not change in the middle of a forward pass, so every push pauses the server. What
# becomes of a request that is running at that moment is the choice of ``pause_mode``. To see it,
# ``carry`` starts a long request, waits until it runs, and pushes a model.

LONG = 600


def is_running() -> bool:
    return engine.call("GET", "/v1/loads")["loads"][0]["num_running_reqs"] > 0


def carry(model: LlamaForCausalLM, pause_mode: Any) -> dict[str, Any]:
    scheme = SGLangWeightSyncScheme(engine.url, pause_mode=pause_mode)
    with scheme.create_sender() as sender, ThreadPoolExecutor(1) as background:
        sender.init_all_workers_group()  # make the group now, before the clock runs
        request = background.submit(engine.generate, PROMPT, LONG)
        while not is_running():
            time.sleep(0.01)
        sender.update_weights(model)
        return request.result()


######################################################################
# ``retract``: go on with the new weights
# ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
#
# The server puts the request back into its queue and forgets the keys and values it had computed.
# After the push they are computed again, from the tokens so far, with the new weights.
# ``weight_versions`` tells at which token the request changed over. The server has B now, so we
# push A.

answer = carry(model_a, "retract")
tokens, (first, second) = answer["output_ids"], answer["meta_info"]["weight_versions"]
print(f"made by version {first['version']}: tokens {first['start']} to {first['end']}")
print(f"made by version {second['version']}: tokens {second['start']} to {second['end']}")
switch = first["end"]
assert 0 < switch < LONG == len(tokens)
assert answer["meta_info"]["num_retractions"] == 1
assert answer["meta_info"]["finish_reason"]["type"] == "length"

######################################################################
# Up to the switch, every token is B's own choice. After it, every token is A's, as if A had been
# given the whole text so far.

assert own_choice(model_b, tokens, 0, switch) == 1.0
assert own_choice(model_a, tokens, switch, LONG) == 1.0

######################################################################
# ``in_place``: go on with the old keys and values
# ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
#
# The server freezes the request and lets it go on where it was. Nothing is computed again, which
# is cheap, but the new weights now attend to keys and values that the old weights made. What
# comes out is neither model's text.

answer = carry(model_b, "in_place")
tokens, spans = answer["output_ids"], answer["meta_info"]["weight_versions"]
switch = spans[0]["end"]
by_a = own_choice(model_a, tokens, switch, LONG)
by_b = own_choice(model_b, tokens, switch, LONG)
print(f"after the switch, A would have chosen {by_a:.0%} of the tokens and B {by_b:.0%}")
assert len(spans) == 2
assert len(tokens) == LONG
assert answer["meta_info"]["num_retractions"] == 0
assert own_choice(model_a, tokens, 0, switch) == 1.0
assert by_a < 1.0
assert by_b < 1.0

######################################################################
# ``abort``: end early
# ^^^^^^^^^^^^^^^^^^^^
#
# The request ends with what it has, all of it made by the old weights. The caller gets a partial
# answer and must be able to live with it. We clear the cache first, for a reason that comes next.

assert sender.flush_cache()
answer = carry(model_a, "abort")
tokens, spans = answer["output_ids"], answer["meta_info"]["weight_versions"]
print(f"{len(tokens)} of {LONG} tokens, finish reason {answer['meta_info']['finish_reason']}")
assert answer["meta_info"]["finish_reason"]["type"] == "abort"
assert len(tokens) < LONG
assert len(spans) == 1
assert own_choice(model_b, tokens, 0, len(tokens)) == 1.0

######################################################################
# The prefix cache
# ----------------
#
# A server keeps the keys and values of prompts it has seen, so that the next request with the
# same beginning starts faster. They are made by the weights of their time, and the cache does not
# know when the weights change. SGLang can flush it while it is paused by ``retract`` or ``abort``.
# It cannot under ``in_place``, because frozen requests still use it. The report warns of that.

assert served(engine) == a_says  # and PROMPT is in the cache now, computed by A

with SGLangWeightSyncScheme(engine.url, pause_mode="in_place").create_sender() as in_place:
    report = in_place.update_weights(model_b)
    print(report.warnings[0])
    answer = engine.generate(PROMPT, max_new_tokens=16, return_logprob=True)
    assert in_place.flush_cache()  # nothing runs any more, so this works
    fresh = served(engine)

stale = answer["output_ids"]
print(f"A says        {a_says}\nB says        {b_says}")
print(f"stale prefix  {stale}\nafter a flush {fresh}")

######################################################################
# A new request, sent after the push was over, got a third text: B's weights on A's prefix. Its
# ``weight_versions`` say B, and its log-probabilities are not B's. Such samples look right and
# train the policy wrongly. The flush heals it.

assert stale not in (a_says, b_says)
assert fresh == b_says
assert answer["meta_info"]["weight_version"] == str(report.version)
with torch.no_grad():
    logits = model_b(torch.tensor([PROMPT + stale])).logits[0, len(PROMPT) - 1 : -1]
true_logprobs = logits.log_softmax(-1)[range(len(stale)), stale]
said_logprobs = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
gap = (said_logprobs - true_logprobs).abs().max().item()
print(f"log-probabilities are off by up to {gap:.1f}")
assert gap > 0.1

######################################################################
# This is why ``retract`` is the default:
#
# - no request is lost, unlike ``abort``;
# - every token after the push is what the new weights would say, unlike ``in_place``;
# - the cache is flushed within the pause, so that no stale prefix is left;
# - its price is one prefill for each running request.
#
# ``sender`` has this default. The same push with it needs no flush by hand.

sender.update_weights(model_a)
assert served(engine) == a_says
sender.update_weights(model_b)
assert served(engine) == b_says
sender.shutdown()

######################################################################
# Several servers
# ---------------
#
# Give a list of URLs. All servers join one group, each bucket of weights is broadcast to all of
# them at once, and none continues before all have the new weights.

second_engine = ReferenceEngine(model_a)
servers = SGLangWeightSyncScheme([engine.url, second_engine.url]).create_sender()
servers.register_model(model_b)
report = servers.update_weights()
print(report)
assert all(outcome.state is EngineState.NEW for outcome in report.engines.values())
assert served(engine) == served(second_engine) == b_says


def last_call(server: ReferenceEngine, path: str) -> dict[str, Any]:
    return [call for call in server.requests() if call["path"] == path][-1]


both = (engine, second_engine)
loaded = max(last_call(server, "/update_weights_from_distributed")["t1"] for server in both)
continued = min(last_call(server, "/continue_generation")["t0"] for server in both)
assert loaded < continued

######################################################################
# When a push fails
# -----------------
#
# The reference engine can be told to misbehave. Here the second server refuses the weights after
# it has written five tensors of them, once.

fault = Fault(
    "/update_weights_from_distributed",
    "refuse",
    when="after_load",
    tensors=5,
    times=1,
    message="no space left",
)
second_engine.inject(fault)
version_before = servers.version
failure = None
try:
    servers.update_weights(model_a)
except WeightUpdateError as error:
    failure = error
    print(error)

######################################################################
# The error names the phase, the server and the server's own words. Its report says what each
# server holds. The second one is ``mixed``: a part of A and a part of B. By default it stays
# paused, so that nobody samples from such weights; requests to it wait. The version has not moved.

assert failure is not None
assert failure.report is not None
assert (failure.phase, failure.engine) == ("transfer", second_engine.url)
assert "no space left" in str(failure)
broken = failure.report.engines[second_engine.url]
assert broken.state is EngineState.MIXED
assert broken.paused
assert servers.version == version_before

background = ThreadPoolExecutor(1)
waiting = background.submit(served, second_engine)
time.sleep(0.5)
assert not waiting.done()

######################################################################
# A push sends all weights, so the next one that succeeds heals every server, whatever it held. The
# request that waited is answered by whole weights.

report = servers.update_weights(model_a)
print(report)
assert served(engine) == served(second_engine) == a_says
assert not any(outcome.paused for outcome in report.engines.values())
assert waiting.result() == a_says
background.shutdown()

servers.shutdown()
engine.stop()
second_engine.stop()

######################################################################
# Conclusion
# ----------
#
# One call brings a model into any number of live servers. Keep ``retract`` unless you know why
# not, read the report, and treat a :class:`~weight_update.WeightUpdateError` as a server that
# waits for the next push. ``examples/`` has two complete training loops: plain PyTorch, and GRPO
# with TorchRL, which ``tutorials/train_with_grpo.py`` takes apart.
