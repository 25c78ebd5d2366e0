"""Follow one block from its input to the next block's scores, stage by stage (a) to (i)."""

from __future__ import annotations

import sys

from nope_probe.circuit_run import Settings, run
from nope_probe.command import run_command


def main() -> None:
    """Run the command line."""
    run_command(Settings, circuit)


def circuit(settings: Settings) -> None:
    """Capture a block's stages, or show them again if that is done, and draw an image if asked."""
    from nope_probe.results import read_run

    out = run(settings)
    manifest = read_run(out).manifest
    lines = [*manifest["answer"], f"report: {out / 'report.html'}"]
    if settings.image is not None:
        from nope_probe.export import export
        from nope_probe.report_circuit import circuit_figure

        export(circuit_figure(read_run(out).arrays["maps"], manifest), settings.image)
        lines.append(f"image: {settings.image}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
