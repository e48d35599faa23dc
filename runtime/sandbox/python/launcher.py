# Starts ipykernel as ipykernel_launcher does, without the working directory in the path of its
# own imports. Importing the debugger, which no client uses, takes a third of the CPU time of
# the imports. ipykernel listens on one more port, for the output of child processes: it is
# above firstKernelPort, too.

import functools
import sys
sys.path[:] = [p for p in sys.path if p]
sys.modules["debugpy.server"] = None
try:
    from ipykernel import kernelapp
except ModuleNotFoundError as error:
    if error.name != "ipykernel":
        raise
    sys.exit(127)
import zmq
del sys.modules["debugpy.server"]
bind = zmq.Socket.bind_to_random_port
zmq.Socket.bind_to_random_port = functools.partialmethod(bind, min_port=61000, max_port=65535)
app = kernelapp.IPKernelApp.instance()
app.initialize(sys.argv[1:])
zmq.Socket.bind_to_random_port = bind
app.start()
