#!/bin/sh
# Every lane of the diagnosis, then the scores. Logs go to runs/diagnosis, results beside this script.
# Usage: run.sh [logs per fault] [model directory]; the seeds are fixed, so equal arguments give equal logs.
set -eu
python=${PYTHON:-python3}
logs=${1:-10}
here=experiments/diagnosis
out=runs/diagnosis
if [ -n "${2:-}" ]; then set -- --model "$2"; else set --; fi

"$python" "$here/live_faults.py" "$out/live" --logs "$logs" --seed 9101 "$@"
"$python" "$here/healthy_logs.py" "$out/healthy" --logs 510 --seed 9103 "$@"
"$python" "$here/series_faults.py" "$out/series" --seed 9104 "$@"
"$python" "$here/threads.py" "$out/threads" --seed 3105 "$@"

"$python" "$here/score.py" "$here/results" --live "$out/live" --healthy "$out/healthy" --series "$out/series" \
	--threads "$out/threads"
"$python" "$here/sweep.py" "$here/results" --first-seed 9200
