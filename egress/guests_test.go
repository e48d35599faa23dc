package egress

import (
	"fmt"
	"strings"

	"github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/testkit"
)

// imports are the imports of the tests' modules, in the order of their function indexes.
var imports = []wat.Import{
	0:  i32Function("doze_egress_v1", "secret_ref", 4),
	1:  i32Function("doze_egress_v1", "hmac_sha256", 8),
	2:  i32Function("doze_egress_v1", "encode_ref", 5),
	3:  {Module: "doze_egress_v1", Name: "deny", Params: i32s(2)},
	4:  {Module: "http_handler", Name: "set_header_value", Params: i32s(5)},
	5:  {Module: "http_handler", Name: "write_body", Params: i32s(3)},
	6:  {Module: "http_handler", Name: "set_status_code", Params: i32s(1)},
	7:  {Module: "doze_egress_v1", Name: "audit_note", Params: i32s(2)},
	8:  {Module: "http_handler", Name: "set_uri", Params: i32s(2)},
	9:  {Module: "http_handler", Name: "get_header_values", Params: i32s(5), Results: []byte{wat.I64}},
	10: {Module: "http_handler", Name: "get_uri", Params: i32s(2), Results: []byte{wat.I32}},
	11: {Module: "doze_egress_v1", Name: "kv_add", Params: []byte{wat.I32, wat.I32, wat.I64, wat.I64, wat.I32}, Results: []byte{wat.I32}},
	12: i32Function("http_handler", "enable_features", 1),
}

func i32s(n int) []byte {
	return []byte(strings.Repeat(string(rune(wat.I32)), n))
}

func i32Function(module, name string, params int) wat.Import {
	return wat.Import{Module: module, Name: name, Params: i32s(params), Results: []byte{wat.I32}}
}

// Offsets in the memory of the tests' modules.
const (
	secretAt = 0 // "token"
	headerAt = 8 // "authorization"
	valueAt  = 32
	refAt    = valueAt + len("Bearer ")
	partAt   = 256 // one part of an HMAC: a length and "data"
	textAt   = 512
	outAt    = 1024
)

func memory() string {
	b := make([]byte, outAt)
	copy(b[secretAt:], "token")
	copy(b[headerAt:], "authorization")
	copy(b[valueAt:], "Bearer ")
	copy(b[partAt:], "\x04\x00\x00\x00data")
	return string(b)
}

// memoryWith returns the memory with a text at textAt.
func memoryWith(text string) string {
	b := []byte(memory())
	copy(b[textAt:], text)
	return string(b)
}

func numbers(list ...int) (code []byte) {
	for _, n := range list {
		code = append(code, wat.I32Const(int32(n))...)
	}
	return code
}

var (
	next = wat.Code(wat.I64Const(1), wat.End)
	stay = wat.Code(wat.I64Const(0), wat.End)
	// refToken writes a reference to refAt, and leaves its length on the stack.
	refToken = wat.Code(numbers(secretAt, len("token"), refAt, 64), wat.Call(0))
)

// guest returns the module of a test policy.
func guest(data string, request []byte) []byte {
	return wat.Handler(imports, data, request, wat.End).Binary()
}

// rewriting rewrites the path of every request.
func rewriting(path string) []byte {
	return guest(memoryWith(path), wat.Code(numbers(textAt, len(path)), wat.Call(8), next))
}

// bearer sends the secret "token" as a bearer token. Each variant is a different module.
func bearer(variant int) []byte {
	return guest(memoryWith(fmt.Sprint(variant)), wat.Code(
		numbers(0, headerAt, len("authorization"), valueAt), refToken, wat.I32Const(int32(len("Bearer "))), wat.Add, wat.Call(4), next))
}

// peeking reads the request's authorization and URI when the response arrives, and notes
// both. Both contain its own reference.
func peeking() []byte {
	response := wat.Code(
		numbers(0, headerAt, len("authorization"), outAt, 1024), wat.Call(9), wat.Drop, numbers(outAt, 128), wat.Call(7),
		numbers(outAt, 1024), wat.Call(10), wat.Drop, numbers(outAt, 128), wat.Call(7), wat.End)
	request := wat.Code(numbers(0, headerAt, len("authorization"), valueAt), refToken, wat.I32Const(int32(len("Bearer "))), wat.Add, wat.Call(4),
		numbers(secretAt, len("token"), textAt+len("/?"), 64), wat.Call(0), numbers(len("/?")), wat.Add, wat.LocalSet(0),
		numbers(textAt), wat.LocalGet(0), wat.Call(8), next)
	m := wat.Handler(imports, memoryWith("/?"), request, response)
	m.Funcs[0].Locals = 1
	return m.Binary()
}

// publishing copies the Authorization header into the body.
func publishing() []byte {
	const length = len("Bearer ") + 38 // of a reference
	return guest(memory(), wat.Code(
		numbers(0, headerAt, len("authorization"), outAt, 1024), wat.Call(9), wat.Drop, numbers(0, outAt, length), wat.Call(5), next))
}

// inBody sends the secret as the body.
func inBody() []byte {
	return guest(memory(), wat.Code(numbers(0, valueAt), refToken, wat.I32Const(int32(len("Bearer "))), wat.Add, wat.Call(5), next))
}

// denying denies every request, with a reason.
func denying(reason string) []byte {
	return guest(memoryWith(reason), wat.Code(numbers(textAt, len(reason)), wat.Call(3), next))
}

// noting adds a note.
func noting(text string) []byte {
	return guest(memoryWith(text), wat.Code(numbers(textAt, len(text)), wat.Call(7), next))
}

// counting notes the value of a counter: 1, then b.
func counting() []byte {
	const one = '1'
	return guest(memory(), wat.Code(numbers(secretAt, len("token")), wat.I64Const(one), wat.I64Const(0), numbers(outAt), wat.Call(11), wat.Drop,
		numbers(outAt, 1), wat.Call(7), next))
}

// responding responds itself instead of the server.
func responding(status int, text string) []byte {
	return guest(memoryWith(text), wat.Code(numbers(status), wat.Call(6), numbers(1, textAt, len(text)), wat.Call(5), stay))
}

// signing computes an HMAC with the secret.
func signing() []byte {
	return guest(memory(), wat.Code(numbers(secretAt, len("token"), 0, 0, partAt, 8, outAt, 32), wat.Call(1), wat.Drop, next))
}

// buffering reads whole responses.
func buffering() []byte {
	return wat.Handler(imports, memory(), wat.Code(numbers(2), wat.Call(12), wat.Drop, next), wat.Code(numbers(0), wat.Drop, wat.End)).Binary()
}

// writing writes more than 1 MiB to a body: the request's if kind is 0, the response's if
// kind is 1.
func writing(kind int) []byte {
	code := []byte{}
	for range 17 {
		code = append(code, wat.Code(numbers(kind, 0, 64<<10), wat.Call(5))...)
	}
	return guest(memory(), wat.Code(code, next))
}

// trapping fails.
func trapping() []byte { return guest(memory(), wat.Code(wat.Unreachable, wat.End)) }

// push pushes a module of the owner.
func (r *rig) push(name string, wasm []byte) {
	r.t.Helper()
	if _, err := r.PutPolicy(testkit.Context(r.t), owner, name, wasm); err != nil {
		r.t.Fatal(err)
	}
}

// secret stores a secret of the owner.
func (r *rig) secret(name, value string, hosts ...string) {
	r.t.Helper()
	if _, err := r.Secrets.Put(testkit.Context(r.t), owner, name, []byte(value), hosts); err != nil {
		r.t.Fatal(err)
	}
}

// operatorsSecret stores a secret of the operator.
func (r *rig) operatorsSecret(name, value string, hosts ...string) {
	r.t.Helper()
	if _, err := r.Secrets.Put(testkit.Context(r.t), operator, name, []byte(value), hosts); err != nil {
		r.t.Fatal(err)
	}
}

// bearerOfTheNode adds a node rule that sends the operator's secret "api" to a host.
func (r *rig) bearerOfTheNode(host, value string) {
	r.t.Helper()
	r.operatorsSecret("api", value, host)
	if _, err := r.PutPolicy(testkit.Context(r.t), operator, "bearer", bearer(1)); err != nil {
		r.t.Fatal(err)
	}
	r.nodeRules(through(host, "bearer", "api"))
}

// through returns a rule that runs a policy with a secret as its "token".
func through(host, policy, secret string) rule.Rule {
	use := rule.Use{Policy: policy}
	if secret != "" {
		use.Secrets = map[string]string{"token": secret}
	}
	return rule.Rule{Name: "through", Hosts: []string{host}, Action: rule.Policies, Policies: []rule.Use{use}}
}
