#!/usr/bin/env bash
# Runs every command of the ```bash blocks of a Markdown file, in order; stops at a failure.
# `make test` is left to the caller, which runs it last and by itself, and so are the examples and
# tutorials, which it runs as they are shown (tests/docs/test_examples.py).
set -euo pipefail
awk '/^```bash$/ { inside = 1; next } /^```$/ { inside = 0 } inside && NF && !/^#/' "$1" |
while IFS= read -r line; do
  command=${line%%  #*}
  case $command in
  "make test" | ".venv/bin/python examples/"* | ".venv/bin/python tutorials/"*) continue ;;
  esac
  printf '\n$ %s\n' "$command"
  bash -euo pipefail -c "$command" < /dev/null
done
