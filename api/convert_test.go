package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/explain"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// TestConversionsLoseNothing: a value whose fields are all set becomes one whose fields
// are all set.
func TestConversionsLoseNothing(t *testing.T) {
	for _, converted := range []any{
		fileOf(filled[guest.FileInfo]()),
		execExitOf(&guest.ExecResult{ExitCode: 1, Signal: "SIGHUP", TimedOut: true, Duration: time.Second}),
		processOf(filled[guest.Process]()),
		eventOf(filled[sandbox.Event]()),
		*conditionOf(filled[sandbox.Condition]()),
		snapshotOf(filled[sandbox.Snapshot]()),
		backupOf(filled[sandbox.Backup]()),
		*archivedDiskOf(&sandbox.Backup{ID: "x", Usage: sandbox.DiskUsage{Bytes: 1}}),
		backupProgressOf(filled[sandbox.BackupProgress]()),
		mountOf(filled[sandbox.Mount]()),
		limitsOf(filled[sandbox.Limits]()),
		nodeDiskUsageOf(filled[sandbox.DiskReport]()),
		pendingOf(filled[sandbox.PendingOperation]()),
		flowOf(filled[audit.Entry]()),
		explanationOf(filled[explain.Explanation]()),
		secretOf(filled[vault.Secret]()),
		lineOf(filled[policylog.Line]()),
	} {
		for _, field := range zeroFields(reflect.ValueOf(converted), reflect.TypeOf(converted).Name()) {
			t.Errorf("%s is not set", field)
		}
	}
}

// TestConversionsUseEachField: the result depends on each field of the domain type, but on
// those that the API leaves out.
func TestConversionsUseEachField(t *testing.T) {
	a := newAPI(t, Config{})
	checkFieldsUsed(t, func(f guest.FileInfo) types.File {
		f.Type = strings.ReplaceAll(f.Type, "x", string(types.FileTypeSymlink)) // unknown types become other
		return fileOf(f)
	})
	checkFieldsUsed(t, func(r guest.ExecResult) types.ExecExit { return execExitOf(&r) })
	checkFieldsUsed(t, processOf)
	checkFieldsUsed(t, func(s guest.WatchStarted) types.WatchStarted { return watchStartedOf(guest.WatchSpec{}, s) })
	checkFieldsUsed(t, func(s guest.WatchSpec) types.WatchStarted { return watchStartedOf(s, guest.WatchStarted{}) }, "Since")
	checkFieldsUsed(t, eventOf)
	checkFieldsUsed(t, feedEventOf, "Owner")
	checkFieldsUsed(t, conditionOf)
	checkFieldsUsed(t, snapshotOf, "Owner", "Depth", "Temporary", "Progress")
	checkFieldsUsed(t, backupOf, "Owner", "Layers")
	checkFieldsUsed(t, backupProgressOf)
	checkFieldsUsed(t, mountOf)
	checkFieldsUsed(t, limitsOf)
	checkFieldsUsed(t, nodeDiskUsageOf)
	checkFieldsUsed(t, fileSystemOf)
	checkFieldsUsed(t, diskTotalOf)
	checkFieldsUsed(t, sandboxDiskOf)
	checkFieldsUsed(t, pendingOf)
	checkFieldsUsed(t, func(q sandbox.Quarantined) []types.QuarantinedSandbox {
		return quarantinedOf("x", []sandbox.Quarantined{q})
	}, "Owner")
	checkFieldsUsed(t, flowOf)
	checkFieldsUsed(t, explanationOf)
	checkFieldsUsed(t, explainedSecretOf)
	checkFieldsUsed(t, secretOf)
	checkFieldsUsed(t, policyOf)
	checkFieldsUsed(t, lineOf)
	checkFieldsUsed(t, presetOf)
	checkFieldsUsed(t, func(r rule.Rule) types.Rule {
		r.Action = rule.Action(strings.ReplaceAll(string(r.Action), "x", string(rule.Deny))) // unknown actions are implied
		return ruleTo(r)
	})
	checkFieldsUsed(t, func(s ruleset.Set) types.RuleSet { return ruleSetOf(s, nil) })
	checkFieldsUsed(t, func(w rule.Warning) types.RuleSet { return ruleSetOf(ruleset.Set{}, []rule.Warning{w}) })
	checkFieldsUsed(t, sessionOf)
	checkFieldsUsed(t, contextOf, "Env", "Environment", "Kernel", "Spare")
	checkFieldsUsed(t, codeValueOf)
	checkFieldsUsed(t, codeErrorOf)
	checkFieldsUsed(t, func(p sandbox.Port) types.Port { return a.portOf(sandbox.Sandbox{}, p) })
	// Env and EnvChanges are merged, so that the same variable may come from both.
	merged := a.sandboxOf(sandbox.Sandbox{Env: map[string]string{"a": "1", "b": "1", "c": "1"}, EnvChanges: map[string]*string{"b": nil, "c": new("2"), "d": new("2")}}).Env
	if diff := cmp.Diff(map[string]string{"a": "1", "c": "2", "d": "2"}, merged); diff != "" {
		t.Errorf("the environment (-want +got):\n%s", diff)
	}
	checkFieldsUsed(t, a.sandboxOf, "Env", "EnvChanges", "Limits", "Terminals", "Sessions", "Contexts", "Warm", "Declared", "StartedAt", "Listening", "CreatedFrom", "Rebase", "Mounts", "StaleArchives",
		"Disk", "DiskAllowance", "DiskStops")
	checkFieldsUsed(t, terminalOf)
	checkFieldsUsed(t, func(l guest.Listening) types.ListeningPort { return *listeningOf(&l) })
}

// checkFieldsUsed expects that each exported field of T that is zero changes the result of
// convert, but for those in omitted.
func checkFieldsUsed[T, U any](t *testing.T, convert func(T) U, omitted ...string) {
	t.Helper()
	kind, full := reflect.TypeFor[T](), convert(filled[T]())
	for i := range kind.NumField() {
		field := kind.Field(i)
		if !field.IsExported() {
			continue
		}
		value := filled[T]()
		reflect.ValueOf(&value).Elem().Field(i).SetZero()
		if unused := cmp.Equal(full, convert(value)); unused != slices.Contains(omitted, field.Name) {
			t.Errorf("%s.%s: unused is %v", kind, field.Name, unused)
		}
	}
}

// filled returns a T whose fields are all set.
func filled[T any]() T {
	var v T
	fill(reflect.ValueOf(&v).Elem())
	return v
}

func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(time.Second))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	case reflect.Float64:
		v.SetFloat(1)
	case reflect.Pointer:
		if v.Type() == reflect.TypeFor[*sandbox.Backup]() { // of a Sandbox, which a Backup has
			v.Set(reflect.ValueOf(&sandbox.Backup{ID: "x", Usage: filled[sandbox.DiskUsage]()}))
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key)
		fill(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		switch v.Type() {
		case reflect.TypeFor[time.Time]():
			v.Set(reflect.ValueOf(time.Unix(1, 0)))
			return
		case reflect.TypeFor[netip.Addr]():
			v.Set(reflect.ValueOf(netip.AddrFrom4([4]byte{192, 0, 2, 1})))
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i))
			}
		}
	default:
		panic("cannot fill a " + v.Type().String())
	}
}

// zeroFields returns the names of the fields of v, and of structs below it, that are zero.
func zeroFields(v reflect.Value, name string) []string {
	switch {
	case v.IsZero():
		return []string{name}
	case v.Kind() == reflect.Pointer:
		return zeroFields(v.Elem(), name)
	case v.Kind() == reflect.Slice && v.Len() > 0:
		return zeroFields(v.Index(0), name+"[0]")
	case v.Kind() != reflect.Struct || v.Type() == reflect.TypeFor[time.Time]():
		return nil
	}
	var zero []string
	for i := range v.NumField() {
		zero = append(zero, zeroFields(v.Field(i), name+"."+v.Type().Field(i).Name)...)
	}
	return zero
}

// TestEveryCodeOfAGuestIsMapped: each has a code of the API. Failures of the guest itself
// become guest_error, like unknown codes.
func TestEveryCodeOfAGuestIsMapped(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../runtime/guest/protocol.go", nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(spec.Names[0].Name, "Code") {
			return true
		}
		code, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		found++
		if _, mapped := guestCodes[code]; !mapped && code != guest.CodeInternal {
			t.Errorf("%s = %q has no code of the API", spec.Names[0].Name, code)
		}
		return true
	})
	if found != len(guestCodes)+1 {
		t.Errorf("the guest has %d codes, and %d are mapped", found, len(guestCodes))
	}
}
