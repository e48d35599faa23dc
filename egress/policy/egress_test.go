package policy

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	. "github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/problem"
)

// vault records its calls.
type vault struct {
	calls []string
	err   error
}

func (v *vault) record(what ...string) ([]byte, error) {
	v.calls = append(v.calls, strings.Join(what, " "))
	if v.err != nil {
		return nil, v.err
	}
	return []byte("made-" + what[0]), nil
}

func (v *vault) Reference(name string) (string, error) {
	b, err := v.record("ref", name)
	return string(b), err
}

func (v *vault) Encode(encoding int32, text string) (string, error) {
	b, err := v.record("encode", string('0'+encoding), text)
	return string(b), err
}

func (v *vault) HMAC(name, prefix string, parts [][]byte) ([]byte, error) {
	words := []string{"hmac", name, prefix}
	for _, p := range parts {
		words = append(words, string(p))
	}
	return v.record(words...)
}

func (v *vault) Sign(name string, algorithm int32, data []byte) ([]byte, error) {
	return v.record("sign", name, string('0'+algorithm), string(data))
}

func TestSecretFunctionsCallTheSource(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "request ref token", "request encode 0 user:made-ref", "request hmac key AWS4 date region service",
		"request sign app 1 header.claims", "response ref token")
	send := func(v *vault) *result {
		return run(httptest.NewRecorder(), request("GET", "/"), Info{}, []Step{{Policy: p, Secrets: v}}, noUpstream)
	}
	v := &vault{}
	expectNotes(t, send(v), "made-ref", "made-encode", "made-hmac", "made-sign", "-2")
	want := "ref token|encode 0 user:made-ref|hmac key AWS4 date region service|sign app 1 header.claims"
	if got := strings.Join(v.calls, "|"); got != want {
		t.Errorf("got the calls %s", got)
	}
	for err, code := range map[error]string{secret.ErrUnknown: "-1", secret.ErrNotAllowed: "-2", secret.ErrBadArgument: "-3", secret.ErrLimit: "-4"} {
		expectNotes(t, send(&vault{err: err}), code, code, code, code, "-2")
	}
	if d := send(&vault{err: errors.New("sealed")}).Denied; d == nil || d.Code != problem.SecretNotAllowed || d.Reason != "sealed" {
		t.Errorf("got %+v", d)
	}
	expectNotes(t, func() *result {
		_, x := exchange(scripted(t, h, "request ref unknown", "request sign app 4 x", "request encode 9 x", "request hmac key AWS4"), request("GET", "/"), nil)
		return x
	}(), "-1", "-3", "-3", "-3")
}

func TestSignaturesPerRequestAreBounded(t *testing.T) {
	h := newHost(t, nil)
	lines := []string{"request sign app 1 x", "request sign app 1 x", "request sign app 1 x", "request sign app 1 x", "request sign app 1 x"}
	p := scripted(t, h, lines...)
	for range 2 {
		v := &vault{}
		x := run(httptest.NewRecorder(), request("GET", "/"), Info{}, []Step{{Policy: p, Secrets: v}}, noUpstream)
		expectNotes(t, x, "made-sign", "made-sign", "made-sign", "made-sign", "-4")
		if len(v.calls) != maxSigns {
			t.Errorf("%d signatures were made", len(v.calls))
		}
	}
}

func TestPoliciesGetTheSandbox(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "request sandbox")
	info := Info{Sandbox: Sandbox{ID: "k3f9x2m7q1az", Name: "build", Owner: "ann", Labels: map[string]string{"team": "a"}}}
	x := run(httptest.NewRecorder(), request("GET", "/"), info, []Step{{Policy: p}}, noUpstream)
	expectNotes(t, x, `{"id":"k3f9x2m7q1az","name":"build","owner":"ann","labels":{"team":"a"}}`)
}

func TestNotesAreBounded(t *testing.T) {
	h := newHost(t, nil)
	lines := []string{"request note " + strings.Repeat("ä", 200) + "\x07\r"}
	for range 20 {
		lines = append(lines, "request note more")
	}
	_, x := exchange(scripted(t, h, lines...), request("GET", "/"), nil)
	if len(x.Notes) != 8 || x.Notes[0] != strings.Repeat("ä", 128) || x.Notes[7] != "more" {
		t.Errorf("notes %q", x.Notes)
	}
}

func TestStoredValuesAreSeparateByNameAndNamespace(t *testing.T) {
	h := newHost(t, nil)
	lines := commands(t, "request kv-add count 2 0", "request kv-add count -5 0", "request kv-get name", "request kv-set name ann 0", "request kv-get name", "request kv-add name 1 0")
	m := compile(t, h, "one", guest(t, script))
	other := compile(t, h, "other", guest(t, script))
	send := func(m *Module, namespace string) *result {
		return run(httptest.NewRecorder(), request("GET", "/"), Info{}, []Step{{Policy: configure(t, m, lines), Namespace: namespace}}, noUpstream)
	}
	// A guest that fails while it reads leaves nothing locked.
	bad := Handler(imported("doze_egress_v1.kv_get"), "name", Code(I32Const(0), I32Const(4), I32Const(-1), I32Const(-1), Call(0), Drop, pass), none)
	first := []string{"2", "-3", "-1", "0", "ann", "-3"}
	expectNotes(t, send(m, "ann"), first...)
	send(compile(t, h, "one", bad.Binary()), "ann")
	expectNotes(t, send(m, "ann"), "-1", "-6", "ann", "0", "ann", "-3")
	expectNotes(t, send(m, "bob"), first...)
	expectNotes(t, send(other, "ann"), first...)
}

func TestLifetimesOfStoredValuesAreCheckedAtTheirExtremes(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "request kv-set a 1 -9223372036854775808", "request kv-add b 1 -9223372036854775808", "request kv-set c 1 -1",
		"request kv-set d 1 9223372036854775807", "request kv-get d")
	_, x := exchange(p, request("GET", "/"), nil)
	expectNotes(t, x, "-3", "-3", "-3", "0", "1")
}

func TestADeniedBufferedResponseIsNotCut(t *testing.T) {
	h := newHost(t, nil)
	p := scripted(t, h, "start enable 2", "response deny no")
	w, x := exchange(p, request("GET", "/"), func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200) })
	if x.Cut || x.Denied == nil || len(w.Header()) != 0 {
		t.Errorf("got %+v, %v, %v", x.Denied, x.Cut, w.Header())
	}
}
