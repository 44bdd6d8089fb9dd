#!/bin/sh
# Every lane of the diagnosis, then the scores. Logs go to runs/diagnosis, results beside this script.
# Usage: run.sh [logs per fault] [model directory]; the seeds are fixed, so equal arguments give equal logs.
set -eu
python=${PYTHON:-python3}
logs=${1:-10}
here=experiments/diagnosis
out=runs/diagnosis
if [ -n "${2:-}" ]; then set -- --model "$2"; else set --; fi

# Two training runs: one whose single update moves k3 well above the noise of bfloat16, and one of half its step.
half=$(( (logs + 1) / 2 ))
"$python" "$here/live_faults.py" "$out/live" --logs "$half" --seed 4101 --learning-rate 4e-4 "$@"
"$python" "$here/live_faults.py" "$out/live" --logs $(( logs - half )) --first "$half" --seed 3102 "$@"
"$python" "$here/healthy_logs.py" "$out/healthy" --logs 510 --seed 3103 "$@"
"$python" "$here/series_faults.py" "$out/series" --seed 3104 "$@"
"$python" "$here/threads.py" "$out/threads" --seed 3105 "$@"

"$python" "$here/score.py" "$here/results" --live "$out/live" --healthy "$out/healthy" --series "$out/series" \
	--threads "$out/threads"
"$python" "$here/sweep.py" "$here/results" --first-seed 3100
