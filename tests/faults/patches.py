"""Written as `sitecustomize.py` into a folder that every process of the fleet has on its path: faults that can only be
made from inside a process. A file in the folder `$0/do` triggers one:

    raise-PID   the next step of the engine in that process raises; with "memory" in it, for want of memory
    clock       its text is added to the wall clock (seconds) of every process
"""

SITECUSTOMIZE = '''
import importlib.abc, importlib.machinery, importlib.util, os, sys, time
from pathlib import Path

FOLDER = Path(__file__).parent / "do"
_real_time = time.time
_clock = FOLDER / "clock"

def shifted_time():
    try:
        return _real_time() + float(_clock.read_text())
    except (OSError, ValueError):
        return _real_time()

time.time = shifted_time


class Hook(importlib.abc.MetaPathFinder):
    """Wraps the runner's step once its module is loaded."""

    def find_spec(self, name, path, target=None):
        if name != "sonar.worker.model_runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            wrap(module)

        spec.loader.exec_module = exec_module
        return spec


def wrap(module):
    whole = module.ModelRunner._run

    def run(self, *args, **kwargs):
        order = FOLDER / f"raise-{os.getpid()}"
        if order.exists():
            wants = order.read_text()
            order.unlink()
            if wants == "memory":
                module.torch.empty(1 << 50)
            raise RuntimeError("an error that a test asked for")
        return whole(self, *args, **kwargs)

    module.ModelRunner._run = run


sys.meta_path.insert(0, Hook())
'''
