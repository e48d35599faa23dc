package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tetratelabs/wazero/api"

	"github.com/doze-run/doze/egress/policy/meter"
)

// Functions that a policy exports.
const (
	handleRequest  = "handle_request"
	handleResponse = "handle_response"
)

// check returns all reasons why a module is not a valid policy, as a joined error.
func check(m *meter.Module) error {
	errs := []error{
		exports(m, handleRequest, "() -> (i64)"),
		exports(m, handleResponse, "(i32, i32) -> ()"),
	}
	if e, ok := m.Exports["memory"]; !ok || e.Kind != meter.Memory {
		errs = append(errs, errors.New("it does not export its memory as `memory`"))
	}
	for _, name := range []string{"_initialize", "_start"} {
		if e, ok := m.Exports[name]; ok && (e.Kind != meter.Function || len(e.Signature.Params)+len(e.Signature.Results) > 0) {
			errs = append(errs, fmt.Errorf("its `%s` is not a function () -> ()", name))
		}
	}
	for _, i := range m.Imports {
		errs = append(errs, imports(i))
	}
	return errors.Join(errs...)
}

func exports(m *meter.Module, name, want string) error {
	switch e, ok := m.Exports[name]; {
	case !ok:
		return fmt.Errorf("it does not export `%s`: with Go, write `//go:wasmexport %s` and build with GOOS=wasip1 GOARCH=wasm -buildmode=c-shared", name, name)
	case e.Kind != meter.Function || signature(e.Signature) != want:
		return fmt.Errorf("its `%s` is not %s", name, want)
	}
	return nil
}

func imports(i meter.Imported) error {
	offered, ok := hostModules[i.Module]
	if !ok || i.Module == meter.Import {
		return fmt.Errorf("it imports %.80q of %.80q: only %s, %s and %s are offered", i.Name, i.Module, handlerModule, egressModule, wasiModule)
	}
	at := slices.IndexFunc(offered, func(f function) bool { return f.name == i.Name })
	if at < 0 {
		return fmt.Errorf("it imports %.80q, which %s does not have", i.Name, i.Module)
	}
	got, want := signature(i.Signature), signature(meter.Signature{Params: offered[at].params, Results: offered[at].results})
	if got != want {
		return fmt.Errorf("it imports %s of %s as %s: it is %s", i.Name, i.Module, got, want)
	}
	return nil
}

func signature(s meter.Signature) string { return types(s.Params) + " -> " + types(s.Results) }

func types(list []meter.ValueType) string {
	var names []string
	for _, t := range list[:min(len(list), 16)] {
		names = append(names, api.ValueTypeName(t))
	}
	return "(" + strings.Join(names, ", ") + ")"
}
