package sandbox

import (
	"fmt"
	"slices"

	"github.com/doze-run/doze/runtime/jupyter"
)

// Language of a context.
type Language string

const (
	Python     Language = "python"
	JavaScript Language = "javascript"
	TypeScript Language = "typescript"
)

// Languages returns all languages.
func Languages() []Language { return []Language{Python, JavaScript, TypeScript} }

// interpreter is the kernel of a language.
type interpreter struct {
	// argv starts the kernel with a connection file. It exits with code 127 if a part of the
	// kernel is not installed.
	argv func(file string) []string
	env  map[string]string
	// setup is executed before the first code.
	setup string
	// flush is jupyter.Options.Flush.
	flush func(messageType string) string
	// missing describes the kernel, and install how to install it.
	missing, install string
}

// pythonLauncher starts ipykernel as ipykernel_launcher does, without the working directory in
// the path of its own imports. Importing the debugger, which no client uses, takes a third of
// the CPU time of the imports. ipykernel listens on one more port, for the output of child
// processes: it is above firstKernelPort, too.
const pythonLauncher = `
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
`

var deno = interpreter{
	argv:    func(file string) []string { return []string{"deno", "jupyter", "--kernel", "--conn", file} },
	env:     map[string]string{"NO_COLOR": "1", "DENO_NO_UPDATE_CHECK": "1"},
	setup:   `globalThis.require = (await import("node:module")).createRequire(Deno.cwd() + "/"); undefined`,
	flush:   jupyter.FlushDeno,
	missing: "Deno",
	install: "use the image doze/node, or install it with npm install -g deno",
}

var interpreters = map[Language]interpreter{
	Python: {
		argv: func(file string) []string {
			return []string{"python3", "-c", pythonLauncher, "-f", file, "--HistoryManager.enabled=False"}
		},
		missing: "Python 3 with ipykernel",
		install: "use the image doze/python, or install it with apt-get install python3-ipykernel or pip install ipykernel",
	},
	JavaScript: deno,
	TypeScript: deno,
}

// InterpreterError: the sandbox does not have the kernel of a language.
type InterpreterError struct {
	Language Language
}

func (e *InterpreterError) Error() string {
	return fmt.Sprintf("the sandbox has no %s, which executes %s", interpreters[e.Language].missing, e.Language)
}

// Remedy describes how to install the kernel.
func (e *InterpreterError) Remedy() string { return interpreters[e.Language].install }

func validateWarm(languages []Language) error {
	for i, l := range languages {
		if !isLanguage(string(l)) || slices.Contains(languages[:i], l) {
			return &InvalidError{Field: "warm", Reason: fmt.Sprintf("%q is twice in the list, or not a language of contexts", clip(string(l))), Want: "use python, javascript and typescript, each once"}
		}
	}
	return nil
}

func isLanguage(s string) bool { return slices.Contains(Languages(), Language(s)) }
