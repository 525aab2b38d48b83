"""The process that answers the page's questions: a line of JSON each way."""

import json
import signal
import sys

from jaxdp_episodic.tools.explore.questions import reply

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    for line in sys.stdin.buffer:
        print(json.dumps(reply(line), allow_nan=False), flush=True)
