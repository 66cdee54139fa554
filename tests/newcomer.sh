#!/usr/bin/env bash
# What a newcomer does in the first minutes, in a home of its own: a text, a chat, a saved session, a tool call, a
# verdict of the gate. Uses the edgekv on the PATH; with --install, first installs the checkout into a fresh
# environment (needs a package index).
#
#     tests/newcomer.sh [--install]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
home=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null; rm -rf "$home"' EXIT
export HOME=$home XDG_CACHE_HOME=${XDG_CACHE_HOME:-$home/.cache} XDG_STATE_HOME=$home/.local/state HF_HUB_OFFLINE=1

if [[ ${1-} == --install ]]; then
    python3 -m venv "$home/venv"
    "$home/venv/bin/pip" install -q "$root[chat,grammar,plot,serve]"
    PATH=$home/venv/bin:$PATH
fi
cd "$home"

must() { # WHAT TEXT PATTERN
    grep -qE "$3" <<<"$2" || {
        printf 'no %s in:\n%s\n' "$1" "$2" >&2
        exit 1
    }
    printf 'ok: %s\n' "$1"
}

text=$(edgekv run --ctx 1024 --prompt 'It was a dark night when the old man' --seed 1 2>report)
must 'text' "$text" '[a-z]{3,}'
must 'report of a few lines' "$(cat report)" '^memory +cache '
(($(wc -l <report) <= 6)) || { cat report >&2 && exit 1; }

answer=$(echo 'Who is there?' | edgekv chat --ctx 1024 --kv q3 --session talk.kv --max-new-tokens 12 --seed 1 2>said)
must 'answer' "$answer" '[A-Za-z]{3,}'
must 'word on what this model is for' "$(cat said)" 'old novels'
printf '/history\n/exit\n' | edgekv chat --session talk.kv 2>said
must 'saved session that goes on' "$(cat said)" 'user: Who is there\?'

edgekv serve --port 0 --ctx 1024 2>served &
server=$!
for _ in {1..300}; do
    grep -q 'http://' served && break
    kill -0 "$server" || { cat served >&2 && exit 1; }
    sleep 0.2
done
call=$(python - "$(grep -oE -m 1 'http://[0-9.:]+' served)" <<'PYTHON'
import json, sys, urllib.request
zones = {"type": "object", "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}}, "required": ["zone"]}
body = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What time is it?"}],
    "tools": [{"type": "function", "function": {"name": "clock", "parameters": zones}}],
    "tool_choice": {"type": "function", "function": {"name": "clock"}},
}
request = urllib.request.Request(
    sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request, timeout=120) as answer:
    (called,) = json.load(answer)["choices"][0]["message"]["tool_calls"]
print(called["function"]["name"], json.loads(called["function"]["arguments"]))
PYTHON
)
must 'tool call' "$call" "^clock \{'zone': '(UTC|CET)'\}$"
kill -INT "$server" && wait "$server" || true
server=

# The prose that the demo model wrote, wherever the package put it.
prose=$(python -c 'from edgekv.checkpoint.hub import shipped_file; print(shipped_file("demo/prose.txt"))')
verdict=$(edgekv eval --gate --model demo --text "$prose" --kv q3 --ctx 512 --needles 2)
must 'verdict of the gate' "$verdict" '^recommended: --kv q3 '
warned=$(edgekv run --ctx 1024 --kv q3 --prompt 'It was' --max-new-tokens 2 2>&1)
must 'word on the verdict' "${warned//never gated/}" '^stopped'
[[ $warned != *'never gated'* ]] || { echo "$warned" >&2 && exit 1; }
echo 'a newcomer arrives'
