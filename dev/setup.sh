#!/bin/sh
# Installs what the project is built and tested with, on Debian and Ubuntu; does nothing where it is all there.
# Elsewhere it names what to install. Needs root, or sudo.
set -eu

program='#include <cjson/cJSON.h>
#include <zlib.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <criterion/criterion.h>'
complete() {
    for tool in make cc c++ gnuplot; do command -v "$tool" >/dev/null 2>&1 || return 1; done
    printf '%s\n' "$program" | cc -fsyntax-only -x c - 2>/dev/null &&
        echo '#include <boost/context/detail/fcontext.hpp>' | c++ -fsyntax-only -x c++ - 2>/dev/null
}

if complete; then exit 0; fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: found no apt-get; install make, C and C++ compilers with OpenMP, gnuplot (figures), and the libraries cJSON, zlib, PCRE2, Criterion and Boost.Context (tests)" >&2
    exit 1
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || { echo "setup: found neither root nor sudo, expected one of them to install packages" >&2; exit 1; }
    sudo=sudo
fi
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -q
$sudo apt-get install -q -y --no-install-recommends make gcc g++ libc6-dev libcjson-dev zlib1g-dev libpcre2-dev libcriterion-dev libboost-context-dev gnuplot-nox
complete || { echo "setup: the packages are installed, but a program that includes them does not compile: see cc's message below" >&2
              printf '%s\n' "$program" | cc -fsyntax-only -x c -; }
