"""The ranks of a sharded trainer: one leads and talks to the engines, the others read with it.

A shard becomes a whole value only if every rank that holds a part takes part in the gather, in
the same order. So the leader says what is read next, and the others read exactly that:

1. Every rank says that it is ready, with digests of what it extracted, or with its error. An
   error, another list, or a rank that does not come in time ends the update on all of them
   before any engine is touched.
2. The leader updates the engines. Before it reads a bucket it announces the bucket's weights;
   the others read them too, throw the values away, and watch for the end meanwhile. One whose
   read fails says so, which the leader finds with :meth:`Crew.check`.
3. The leader says how it ended: all return the same report, or raise the same error.

Nothing of this is a collective. Who waits for a slow engine waits for a message, by a deadline
of its own, and no time-out of the training group runs meanwhile.

The ranks of the leader's host may also take part in its group, so that all their network cards
carry bytes: ``relays.py`` is the leader's side of that, ``relay.py`` the others'.

Where engines open the trainer's memory, the ranks on their GPUs pack what they read instead of
throwing it away: ``sharers.py`` is the leader's side of that, ``sharer.py`` the others'.
"""

from weight_update.update.crew.crew import Crew
from weight_update.update.crew.duty import Relaying, Sharing
from weight_update.update.crew.relay import Relay
from weight_update.update.crew.relays import Relays
from weight_update.update.crew.sharer import Sharer
from weight_update.update.crew.sharers import Sharers

__all__ = ["Crew", "Relay", "Relaying", "Relays", "Sharer", "Sharers", "Sharing"]
