package sdk_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"math"
	"math/big"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/policies/sdk"
	"github.com/doze-run/doze/policies/sdk/sdktest"
)

// serve returns a policy without configuration.
func serve(t *testing.T, p sdk.Policy) *sdktest.Policy {
	t.Helper()
	sdk.Serve(func(struct{}) (sdk.Policy, error) { return p, nil })
	return sdktest.New(t, "")
}

// on returns a policy that only handles requests.
func on(t *testing.T, f func(*sdk.Request) error) *sdktest.Policy {
	t.Helper()
	return serve(t, sdk.Policy{Request: f})
}

func TestARequestIsSeenAndChanged(t *testing.T) {
	p := on(t, func(r *sdk.Request) error {
		if r.Method() != "PATCH" || r.URI() != "/a%20b?c=d&e" || r.Path() != "/a%20b" || r.Query() != "c=d&e" || r.Protocol() != "HTTP/1.1" {
			t.Errorf("got %s %s %s", r.Method(), r.URI(), r.Protocol())
		}
		if names := r.Header.Names(); !slices.Equal(names, []string{"host", "user-agent", "x-empty", "x-many"}) {
			t.Errorf("got the headers %v", names)
		}
		if v := r.Header.Values("X-MANY"); !slices.Equal(v, []string{"1", "2"}) || r.Header.Get("x-many") != "1" {
			t.Errorf("got %v", v)
		}
		if !r.Header.Has("X-Empty") || r.Header.Has("X-None") || r.Header.Get("X-None") != "" || len(r.Header.Values("X-None")) > 0 {
			t.Error("an empty value is taken for an absent one")
		}
		r.SetMethod("REPORT")
		r.SetURI("/x?y")
		r.Header.Set("X-Many", "3")
		r.Header.Add("X-Many", "4")
		r.Header.Del("User-Agent")
		return nil
	})
	r := sdktest.Request("PATCH", "https://api.example.com/a%20b?c=d&e", "")
	r.Header["X-Many"], r.Header["X-Empty"] = []string{"1", "2"}, []string{""}
	got := p.Send(r)
	if got.Method != "REPORT" || got.URI != "/x?y" || !slices.Equal(got.Header["X-Many"], []string{"3", "4"}) || got.Header.Get("User-Agent") != "" {
		t.Errorf("sent %+v", got)
	}
}

func TestLongTextsAreNotTruncated(t *testing.T) {
	long := strings.Repeat("x", 10_000)
	p := on(t, func(r *sdk.Request) error {
		if r.URI() != "/"+long || r.Header.Get("X-Long") != long || r.Header.Values("X-Long")[1] != "short" {
			t.Error("something was cut off")
		}
		return nil
	})
	r := sdktest.Get("https://api.example.com/" + long)
	r.Header["X-Long"] = []string{long, "short"}
	p.Send(r)
}

func TestAnErrorDeniesTheRequest(t *testing.T) {
	p := on(t, func(*sdk.Request) error { return sdk.Deny("not today") })
	if got := p.Send(sdktest.Get("https://api.example.com/")); !got.Denied || got.Reason != "not today" || got.Method != "" {
		t.Errorf("got %+v", got)
	}
}

func TestThePolicyResponds(t *testing.T) {
	p := on(t, func(r *sdk.Request) error { return r.Respond(418, "text/plain", []byte("tea")) })
	got := p.Send(sdktest.Get("https://api.example.com/"))
	if got.Denied || got.Method != "" || got.Response.StatusCode != 418 || got.ResponseBody != "tea" || got.Response.Header.Get("Content-Type") != "text/plain" {
		t.Errorf("got %+v", got)
	}
}

func TestABodyIsReadAndLeftInPlace(t *testing.T) {
	body := strings.Repeat("0123456789", 20_000)
	for _, limit := range []int{len(body), 1 << 20} {
		p := serve(t, sdk.Policy{Features: sdk.BufferRequest, Request: func(r *sdk.Request) error {
			b, err := r.Body.Bytes(limit)
			if string(b) != body {
				t.Errorf("read %d bytes, %v", len(b), err)
			}
			return err
		}})
		if got := p.Send(sdktest.Request("POST", "https://api.example.com/", body)); got.Body != body {
			t.Errorf("sent %d bytes, denied %q", len(got.Body), got.Reason)
		}
	}
}

func TestABodyAboveTheLimitIsAnError(t *testing.T) {
	p := serve(t, sdk.Policy{Features: sdk.BufferRequest, Request: func(r *sdk.Request) error {
		_, err := r.Body.Bytes(9)
		if !errors.Is(err, sdk.ErrTooLarge) {
			t.Errorf("got %v", err)
		}
		return err
	}})
	if got := p.Send(sdktest.Request("POST", "https://api.example.com/", "0123456789")); !got.Denied {
		t.Errorf("got %+v", got)
	}
}

func TestABodyIsReplaced(t *testing.T) {
	p := on(t, func(r *sdk.Request) error {
		first := make([]byte, 3)
		if _, err := io.ReadFull(&r.Body, first); err != nil || string(first) != "old" {
			t.Errorf("read %q, %v", first, err)
		}
		r.Body.Set([]byte("new "))
		_, err := io.WriteString(&r.Body, "body")
		return err
	})
	if got := p.Send(sdktest.Request("POST", "https://api.example.com/", "old body")); got.Body != "new body" {
		t.Errorf("sent %q", got.Body)
	}
	p = on(t, func(r *sdk.Request) error { r.Body.Set(nil); return nil })
	if got := p.Send(sdktest.Request("POST", "https://api.example.com/", "old body")); got.Body != "" {
		t.Errorf("sent %q", got.Body)
	}
}

func TestAResponseIsSeenAndChanged(t *testing.T) {
	p := serve(t, sdk.Policy{
		Features: sdk.BufferResponse | sdk.Trailers,
		Request:  func(r *sdk.Request) error { r.Context = 7; return nil },
		Response: func(r *sdk.Response) error {
			body, err := r.Body.Bytes(100)
			if err != nil || string(body) != "secret" || r.Status() != 201 || r.Header.Get("X-From") != "up" || r.Context != 7 || r.Failed {
				t.Errorf("got %q, %d, %+v", body, r.Status(), r)
			}
			r.SetStatus(202)
			r.Header.Set("X-From", "policy")
			r.Body.Set([]byte("******"))
			r.Trailer.Set("X-End", "1")
			return nil
		},
	})
	p.Upstream = func(*http.Request) *http.Response {
		return &http.Response{StatusCode: 201, Header: http.Header{"X-From": {"up"}}, Body: io.NopCloser(strings.NewReader("secret"))}
	}
	got := p.Send(sdktest.Get("https://api.example.com/"))
	if got.Response.StatusCode != 202 || got.ResponseBody != "******" || got.Response.Header.Get("X-From") != "policy" {
		t.Errorf("got %+v", got)
	}
}

func TestAResponseCanBeWithheld(t *testing.T) {
	p := serve(t, sdk.Policy{Features: sdk.BufferResponse, Response: func(*sdk.Response) error { return errors.New("no") }})
	if got := p.Send(sdktest.Get("https://api.example.com/")); !got.Denied || got.Reason != "no" || got.Method == "" {
		t.Errorf("got %+v", got)
	}
}

func TestSecretsAreRenderedAfterThePolicy(t *testing.T) {
	p := on(t, func(r *sdk.Request) error {
		token, err := sdk.Secret("token")
		if err != nil || strings.Contains(token, "s3cret") || len(token) > 64 {
			t.Errorf("got %q, %v", token, err)
		}
		basic, err := sdk.Basic("user", "token")
		if err != nil {
			return err
		}
		hex, err := sdk.Encode(sdk.Hex, "a"+token)
		if err != nil {
			return err
		}
		nested, err := sdk.Encode(sdk.Base64URL, "?"+hex)
		if err != nil {
			return err
		}
		escaped, err := sdk.Encode(sdk.Percent, token+"&")
		if err != nil {
			return err
		}
		r.Header.Set("Authorization", basic)
		r.SetURI("/" + hex + "?a=" + escaped)
		r.Body.Set([]byte(token + nested))
		return nil
	})
	p.Secrets["token"] = "s3cret/"
	got := p.Send(sdktest.Get("https://api.example.com/"))
	if got.Header.Get("Authorization") != "Basic dXNlcjpzM2NyZXQv" || got.URI != "/617333637265742f?a=s3cret%2F%26" ||
		got.Body != "s3cret/PzYxNzMzMzYzNzI2NTc0MmY" {
		t.Errorf("sent %+v", got)
	}
}

func TestFailuresNameWhatFailed(t *testing.T) {
	p := on(t, func(*sdk.Request) error {
		for what, err := range map[string]error{
			`secret "none": not found`:           second(sdk.Secret("none")),
			`sign with secret "none": not found`: second(sdk.Sign("none", sdk.RS256, nil)),
			`hmac with secret "none": not found`: second(sdk.HMACSHA256("none", "", []byte("a"))),
		} {
			if err == nil || !strings.HasPrefix(err.Error(), what) || !errors.Is(err, sdk.ErrNotFound) {
				t.Errorf("got %v, want %s", err, what)
			}
		}
		if _, err := sdk.Encode(99, "a"); !errors.Is(err, sdk.ErrBadArgument) {
			t.Errorf("got %v", err)
		}
		if _, err := sdk.HMACSHA256("text", ""); !errors.Is(err, sdk.ErrBadArgument) {
			t.Errorf("got %v", err)
		}
		if _, err := sdk.Sign("text", 99, nil); !errors.Is(err, sdk.ErrBadArgument) {
			t.Errorf("got %v", err)
		}
		return nil
	})
	p.Secrets["text"] = "no key"
	p.Send(sdktest.Get("https://api.example.com/"))
}

func second[T any](_ T, err error) error { return err }

func TestHMACsAreChained(t *testing.T) {
	var got [32]byte
	p := on(t, func(*sdk.Request) (err error) {
		got, err = sdk.HMACSHA256("key", "AWS4", []byte("one"), nil, []byte("three"))
		return err
	})
	p.Secrets["key"] = "s3cret"
	p.Send(sdktest.Get("https://api.example.com/"))
	want := []byte("AWS4s3cret")
	for _, part := range []string{"one", "", "three"} {
		mac := hmac.New(sha256.New, want)
		mac.Write([]byte(part))
		want = mac.Sum(nil)
	}
	if !bytes.Equal(got[:], want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

func TestSignatures(t *testing.T) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	keyPEM := func(key any) string {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	}
	data := []byte("data")
	p := on(t, func(*sdk.Request) error {
		sig, err := sdk.Sign("ed", sdk.EdDSA, data)
		if err != nil || !ed25519.Verify(public, data, sig) {
			t.Errorf("EdDSA: %x, %v", sig, err)
		}
		sig, err = sdk.Sign("ec", sdk.ES256, data)
		sum := sha256.Sum256(data)
		if err != nil || len(sig) != 64 || !ecdsa.Verify(&curve.PublicKey, sum[:], new(big.Int).SetBytes(sig[:32]), new(big.Int).SetBytes(sig[32:])) {
			t.Errorf("ES256: %x, %v", sig, err)
		}
		return nil
	})
	p.Secrets["ed"], p.Secrets["ec"] = keyPEM(private), keyPEM(curve)
	p.Send(sdktest.Get("https://api.example.com/"))
}

func TestIdentityOfARequest(t *testing.T) {
	var got sdk.Sandbox
	var host string
	var now time.Time
	p := on(t, func(*sdk.Request) (err error) {
		now = sdk.Now()
		if host, err = sdk.Host(); err != nil {
			return err
		}
		got, err = sdk.CurrentSandbox()
		sdk.Note("seen")
		sdk.Log("a line")
		return err
	})
	for _, name := range []string{"shop", "other"} {
		p.Sandbox = sdktest.Sandbox{ID: "id", Name: name, Owner: "o", Labels: map[string]string{"team": name}}
		result := p.Send(sdktest.Get("https://api.example.com:8443/"))
		if result.Denied || got.Name != name || got.Labels["team"] != name || got.ID != "id" || got.Owner != "o" || host != "api.example.com" || !now.Equal(p.Now) {
			t.Errorf("got %+v, %s, %v (%s)", got, host, now, result.Reason)
		}
		if !slices.Equal(result.Notes, []string{"seen"}) || !slices.Equal(result.Log, []string{"a line"}) {
			t.Errorf("noted %q, logged %q", result.Notes, result.Log)
		}
	}
}

func TestValuesAreStoredBetweenExchanges(t *testing.T) {
	step := 0
	p := on(t, func(*sdk.Request) error {
		step++
		n, err := sdk.KVAdd("count", 2, time.Minute)
		if err != nil || n != []int64{2, 4, 2}[step-1] {
			t.Errorf("step %d: %d, %v", step, n, err)
		}
		value, ok, err := sdk.KVGet("text")
		if err != nil || ok != (step == 2) || step == 2 && string(value) != "kept" {
			t.Errorf("step %d: %q, %v, %v", step, value, ok, err)
		}
		if err := sdk.KVSet("text", make([]byte, 5<<10), 0); !errors.Is(err, sdk.ErrBadArgument) {
			t.Errorf("got %v", err)
		}
		return sdk.KVSet("text", []byte("kept"), 1) // a nanosecond must not become unlimited
	})
	for _, after := range []time.Duration{0, 0, time.Minute} {
		p.Now = p.Now.Add(after)
		if got := p.Send(sdktest.Get("https://api.example.com/")); got.Denied {
			t.Fatal(got.Reason)
		}
	}
}

func TestLifetimesOfStoredValuesAreRoundedAwayFromZero(t *testing.T) {
	p := on(t, func(*sdk.Request) error {
		if _, err := sdk.KVAdd("count", 1, math.MaxInt64); err != nil {
			t.Errorf("the longest lifetime: %v", err)
		}
		if n, err := sdk.KVAdd("count", 1, math.MaxInt64); n != 2 || err != nil {
			t.Errorf("the longest lifetime has ended: %d, %v", n, err)
		}
		for _, ttl := range []time.Duration{-1, math.MinInt64} {
			if err := sdk.KVSet("text", nil, ttl); !errors.Is(err, sdk.ErrBadArgument) {
				t.Errorf("lifetime %d: got %v", ttl, err)
			}
		}
		return nil
	})
	if got := p.Send(sdktest.Get("https://api.example.com/")); got.Denied {
		t.Error(got.Reason)
	}
}

func TestConfigurationsAreChecked(t *testing.T) {
	type config struct {
		Names []string `json:"names"`
	}
	var got config
	sdk.Serve(func(c config) (sdk.Policy, error) {
		if got = c; len(c.Names) == 1 {
			return sdk.Policy{}, errors.New("one is too few")
		}
		return sdk.Policy{}, nil
	})
	for text, want := range map[string]string{
		"":                    "",
		"{}":                  "",
		`{"names":["a","b"]}`: "",
		`{"names":["a"]}`:     "config: one is too few",
		`{"name":[]}`:         `config: there is no "name" here, but names`,
		`{"names":"a"}`:       "config: names: this is a list, not text",
	} {
		_, err := sdktest.Start(text)
		if (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
	if _, err := sdktest.Start(`{"names":["x","y"]}`); err != nil || len(got.Names) != 2 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestAnEmptyPolicyForwardsEverything(t *testing.T) {
	if got := serve(t, sdk.Policy{}).Send(sdktest.Get("https://api.example.com/a")); got.Denied || got.URI != "/a" {
		t.Errorf("got %+v", got)
	}
}
