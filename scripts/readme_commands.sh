#!/usr/bin/env bash
# Runs every command of the ```bash blocks of a Markdown file, in order; stops at a failure.
# `make test` is left to the caller, which runs it last and by itself.
set -euo pipefail
awk '/^```bash$/ { inside = 1; next } /^```$/ { inside = 0 } inside && NF && !/^#/' "$1" |
while IFS= read -r line; do
  command=${line%%  #*}
  [ "$command" = "make test" ] && continue
  printf '\n$ %s\n' "$command"
  bash -euo pipefail -c "$command" < /dev/null
done
