"""The process that answers the page's questions, each in one line of JSON."""

import json
import signal
import sys

from jaxdp_episodic.tools.explore.questions import reply

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    for line in sys.stdin.buffer:
        print(json.dumps(reply(line), allow_nan=False), flush=True)
