#!/bin/sh
# Run the tests where they are not at home: as a background job, without a terminal, in foreign locales, with strange
# variables, from another folder, in reverse order. A suite that passes here passes anywhere.
#
#   tools/hostile_environment.sh                             everything at once, for each locale
#   tools/hostile_environment.sh -c "signals umask"          only some conditions, to find the one at fault
#   tools/hostile_environment.sh -l C                        only this locale
#   tools/hostile_environment.sh -c locale -- tests/cli      arguments after -- go to pytest
#   PYTHON=.venv/bin/python tools/hostile_environment.sh     with this interpreter (the default is python3)
#
# Conditions:
#   signals    Ctrl-C and hang-ups are ignored from the start, as in a job that a script starts with & or nohup
#   terminal   no terminal, a session of its own, standard input closed, output into a file
#   locale     Turkish in UTF-8, German in ISO-8859-1, and plain C without Python's switch to UTF-8 (one run each;
#              the first two are made with localedef in a temporary folder, and left out where that is missing)
#   umask      new files are readable by their owner alone
#   home       HOME is not set, and the folder for temporary files has a space in its name (in UTF-8 also an umlaut)
#   variables  narrow screens, forced colors, CI, proxies that do not answer, a launcher's ranks, three threads
#   folder     pytest starts in the root folder of the file system
#   copy       the tests run in a copy of the files that git tracks, with the compiled kernels, but without .git
#   order      the tests run in reverse order
#   load       two busy loops per core run beside the tests
#
# The exit code is 0 if every run passed.

set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python3}") || { echo "no Python at '${PYTHON:-python3}': set PYTHON" >&2; exit 2; }
case $python in /*) ;; *) python=$(pwd)/$python ;; esac

every="signals terminal locale umask home variables folder copy order load"
conditions="signals terminal locale umask home variables folder copy order"
locales="C tr_TR.UTF-8 de_DE.ISO-8859-1"
while [ $# -gt 0 ]; do
    case $1 in
        -c) conditions=$2; shift 2 ;;
        -l) locales=$2; shift 2 ;;
        -h|--help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
for condition in $conditions; do
    case " $every " in *" $condition "*) ;; *) echo "no condition '$condition'; there are: $every" >&2; exit 2 ;; esac
done
asked() { case " $conditions " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

work=$(mktemp -d "${TMPDIR:-/tmp}/hostile.XXXXXX")
started=""
trap 'for one in $started; do kill "$one" 2>/dev/null || true; done; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

usable=""
if asked locale; then
    mkdir "$work/locales"
    for locale in $locales; do
        if [ "$locale" = C ] ||
            localedef -i "${locale%%.*}" -f "${locale#*.}" "$work/locales/$locale" 2>/dev/null; then
            usable="$usable $locale"
        else
            echo "left out: locale $locale, which localedef cannot make here"
        fi
    done
fi

tests=$root
if asked copy; then
    tests=$work/copy
    mkdir "$tests"
    (cd "$root" && { git ls-files; find src -name '*.so'; } | tar -cf - -T -) | tar -xf - -C "$tests"
fi
cd "$tests"
if asked folder; then cd /; fi

# Paths that are given to pytest are relative to the checkout.
[ $# -gt 0 ] || set -- tests
for argument; do
    shift
    if [ -e "$tests/${argument%%::*}" ]; then argument=$tests/$argument; fi
    set -- "$@" "$argument"
done
set -- -m pytest --rootdir "$tests" -c "$tests/pyproject.toml" -q -p no:cacheprovider -n0 "$@"

if asked order; then
    mkdir "$work/plugins"
    printf 'def pytest_collection_modifyitems(items):\n    items.reverse()\n' >"$work/plugins/reverse_order.py"
    PYTHONPATH=$work/plugins${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    set -- "$@" -p reverse_order
fi
if asked umask; then umask 077; fi
if asked home; then unset HOME; fi
if asked variables; then
    export COLUMNS=20 LINES=5 FORCE_COLOR=1 TERM=dumb TERMINAL_WIDTH=20 CI=true GITHUB_ACTIONS=true PYTHONHASHSEED=7
    export TZ=Asia/Kathmandu OMP_NUM_THREADS=3 MPLBACKEND=module://of_a_notebook RANK=1 LOCAL_RANK=1 WORLD_SIZE=4
    export http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 all_proxy=http://127.0.0.1:9
fi
if asked load; then
    for _ in $(seq $((2 * $(nproc)))); do
        (while :; do :; done) &
        started="$started $!"
    done
fi
if asked signals; then trap '' INT HUP; fi

failed=0
for locale in ${usable:-as_it_is}; do
    log=$work/$locale.log
    (
        case $locale in
            as_it_is) ;;
            C) export LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 ;;
            *) export LOCPATH="$work/locales" LC_ALL="$locale" LANG="$locale" PYTHONUTF8=0 ;;
        esac
        if asked home; then
            case $locale in C|*8859*) TMPDIR="$work/temporary files $locale" ;; *) TMPDIR="$work/temporäre Dateien" ;; esac
            mkdir "$TMPDIR"
            export TMPDIR
        fi
        if asked terminal; then
            exec setsid "$python" "$@" <&- >"$log" 2>&1
        fi
        exec "$python" "$@" >"$log" 2>&1
    ) &
    started="$started $!"
    if wait $!; then verdict=passed; else verdict=FAILED failed=1; fi
    echo "$verdict: conditions $conditions, locale $locale"
    if [ $verdict = passed ]; then tail -n 1 "$log"; else cat "$log"; fi
done
exit $failed
