"""The command line: ``roundelay train | plan | simulate | verify``."""

try:
    from roundelay.cli.app import main
except KeyboardInterrupt:  # Ctrl-C while torch is still being loaded, which takes seconds: no traceback for that
    raise SystemExit(130) from None

__all__ = ["main"]
