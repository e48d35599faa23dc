package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule/explain"
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
		archiveResultOf(filled[guest.ArchiveResult]()),
		processOf(filled[guest.Process]()),
		eventOf(filled[sandbox.Event]()),
		*conditionOf(filled[sandbox.Condition]()),
		limitsOf(filled[sandbox.Limits]()),
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
			fill(v.Field(i))
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
