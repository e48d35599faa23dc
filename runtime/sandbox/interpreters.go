package sandbox

import (
	_ "embed"
	"encoding/json"
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

//go:embed python/launcher.py
var pythonLauncher string

// pythonCharts is code that gives figures a form with their data.
//
//go:embed python/charts.py
var pythonCharts string

// isolated returns code in Python that executes code without names in common with its context.
func isolated(code string) string {
	text, err := json.Marshal(code) // a literal of Python, too
	if err != nil {
		panic(err) // of a string
	}
	return fmt.Sprintf(`exec(compile(%s, "<doze>", "exec"), {})`, text)
}

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
		setup:   isolated(pythonCharts),
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
