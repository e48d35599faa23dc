# Starts ipykernel as ipykernel_launcher does, without the working directory in the path of its
# own imports. Importing the debugger, which no client uses, takes a third of the CPU time of
# the imports. ipykernel listens on one more port, for the output of child processes: it is
# above firstKernelPort, too. It publishes everything that was printed in up to 0.2 s as one
# message, and the node drops messages of more than 16 MiB, so output is published in parts.

import functools
import sys
sys.path[:] = [p for p in sys.path if p]
sys.modules["debugpy.server"] = None
try:
    from ipykernel import iostream, kernelapp
except ModuleNotFoundError as error:
    if error.name != "ipykernel":
        raise
    sys.exit(127)
import zmq
del sys.modules["debugpy.server"]
bind = zmq.Socket.bind_to_random_port
zmq.Socket.bind_to_random_port = functools.partialmethod(bind, min_port=61000, max_port=65535)
part = 2 << 20 # characters: at most 12 MB as JSON; ZeroMQ drops beyond 1,000 messages
def write(self, text, write=iostream.OutStream.write):
    if not isinstance(text, str):
        return write(self, text) # raises an exception
    for i in range(0, len(text), part):
        written = text[i:i + part]
        write(self, written)
        self.unpublished = getattr(self, "unpublished", 0) + len(written)
        if self.unpublished >= part:
            self.unpublished = 0
            self.flush()
    return len(text)
iostream.OutStream.write = write
app = kernelapp.IPKernelApp.instance()
app.initialize(sys.argv[1:])
zmq.Socket.bind_to_random_port = bind
app.start()
