"""Draw the sources of all layers of a run: python docs/make_sources_image.py RUN OUT.png.

The run of the docs is `python -m nope_probe.ablate --model smollm2-135m --players sources
--layers all --n-seqs 64 --seq-len 64`.
"""

import sys

from nope_probe import read_run
from nope_probe.figures import save, source_shares


def main(folder: str, out: str) -> None:
    save(source_shares(read_run(folder).tables["sources"]), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
