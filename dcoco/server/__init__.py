"""The OpenAI-compatible server: `dcoco serve`. Needs the extra `serve`.

app.py       the routes, and how a call goes: check, encode, submit, answer
protocol.py  what may be asked: the bodies of completions and chat completions
prompts.py   from what was asked to token ids
replies.py   the answers, whole and in pieces
errors.py    errors in OpenAI's shape
limits.py    the key and the size of a body, before anything is read
metrics.py   what /metrics and the status page show
address.py   the socket, before anything heavy is loaded
options.py   what the command line may say
status.py    the page at /
run.py       uvicorn, signals, and an orderly end
"""
