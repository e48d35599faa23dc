package reference

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/secret"
)

var errNotBound = errors.New("not bound to this host")

// of returns a set whose secrets are these.
func of(secrets map[string]string) *Set {
	return NewSet(func(id secret.ID) ([]byte, error) {
		value, ok := secrets[id.Name]
		if !ok {
			return nil, errNotBound
		}
		return []byte(value), nil
	})
}

func id(name string) secret.ID { return secret.ID{Owner: "me", Name: name} }

func must(t testing.TB) func(string, error) string {
	return func(s string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func request(t testing.TB, target string) *http.Request {
	t.Helper()
	return httptest.NewRequest(http.MethodPost, target, nil)
}

func TestReferencesAreOpaqueAndValidInOneRequest(t *testing.T) {
	a, b := of(map[string]string{"token": "s3cr3t-value"}), of(map[string]string{"token": "s3cr3t-value"})
	first, second := must(t)(a.Secret(id("token"))), must(t)(b.Secret(id("token")))
	if first == second {
		t.Error("two exchanges have the same reference")
	}
	if again := must(t)(a.Secret(id("token"))); again != first {
		t.Errorf("%s the second time, %s the first", again, first)
	}
	if !regexp.MustCompile(`\A[A-Za-z0-9_-]{1,64}\z`).MatchString(first) || len(first) != length {
		t.Errorf("%s is not a reference", first)
	}
	r := request(t, "https://api.example/")
	r.Header.Set("Authorization", first)
	if used, err := b.Render(r, false); err != nil || used != nil || r.Header.Get("Authorization") != first {
		t.Errorf("another exchange made %q of it: %v, %v", r.Header.Get("Authorization"), used, err)
	}
}

func TestResolveErrorsGoToThePolicy(t *testing.T) {
	if _, err := of(nil).Secret(id("token")); !errors.Is(err, errNotBound) {
		t.Errorf("got %v", err)
	}
}

func TestReferencesAreRenderedWhereTheyStand(t *testing.T) {
	const value = `a/b c+d"é%41`
	s := of(map[string]string{"token": value, "user": "me"})
	token, user := must(t)(s.Secret(id("token"))), must(t)(s.Secret(id("user")))
	basic := must(t)(s.Encode(Base64, user+":"+token))
	nested := must(t)(s.Encode(Hex, "x"+must(t)(s.Encode(Base64URL, token))))
	percent := must(t)(s.Encode(Percent, token+"&"))

	r := request(t, "https://api.example/bot"+token+"/a%2Fb/"+percent+"?q=1&key="+token+"&p="+percent)
	r.Header.Set("Authorization", "Basic "+basic)
	r.Header["X-Both"] = []string{"none", token + ";" + token + user}
	r.Header.Set("X-Nested", nested)
	r.Trailer = http.Header{"X-Trailer": {token}}
	used, err := s.Render(r, false)
	if err != nil {
		t.Fatal(err)
	}
	const escaped = "a%2Fb%20c%2Bd%22%C3%A9%2541"
	for what, c := range map[string][2]string{
		"path":        {r.URL.EscapedPath(), "/bot" + escaped + "/a%2Fb/" + escaped + "%26"},
		"path, plain": {r.URL.Path, "/bot" + value + "/a/b/" + value + "&"},
		"query":       {r.URL.RawQuery, "q=1&key=" + escaped + "&p=" + escaped + "%26"},
		"target":      {r.RequestURI, "https://api.example/bot" + escaped + "/a%2Fb/" + escaped + "%26?q=1&key=" + escaped + "&p=" + escaped + "%26"},
		"basic":       {r.Header.Get("Authorization"), "Basic " + base64.StdEncoding.EncodeToString([]byte("me:"+value))},
		"twice":       {strings.Join(r.Header["X-Both"], ","), "none," + value + ";" + value + "me"},
		"nested":      {r.Header.Get("X-Nested"), hex.EncodeToString([]byte("x" + base64.RawURLEncoding.EncodeToString([]byte(value))))},
		"trailer":     {r.Trailer.Get("X-Trailer"), value},
	} {
		if c[0] != c[1] {
			t.Errorf("%s: %q, want %q", what, c[0], c[1])
		}
	}
	slices.SortFunc(used, func(a, b secret.ID) int { return strings.Compare(a.Name, b.Name) })
	if !slices.Equal(used, []secret.ID{id("token"), id("user")}) {
		t.Errorf("used %v", used)
	}
	if q, err := url.ParseQuery(r.URL.RawQuery); err != nil || q.Get("key") != value {
		t.Errorf("a server reads %q, %v", q.Get("key"), err)
	}
}

func TestReferencesWithinValuesAreNotRendered(t *testing.T) {
	secrets := map[string]string{"a": "first"}
	s := of(secrets)
	a := must(t)(s.Secret(id("a")))
	secrets["b"] = "<" + a + ">"
	r := request(t, "https://api.example/")
	r.Header.Set("X-B", must(t)(s.Secret(id("b"))))
	if _, err := s.Render(r, false); err != nil || r.Header.Get("X-B") != "<"+a+">" {
		t.Errorf("%q, %v", r.Header.Get("X-B"), err)
	}
}

func TestValuesThatAHeaderCannotHoldAreRefused(t *testing.T) {
	for value, want := range map[string]string{
		"token\n":            "ends with a line break: store it without one",
		"token\r\n":          "ends with a line break",
		"a\r\nX-Injected: 1": "line breaks or control characters",
		"a\nb":               "line breaks or control characters",
		"a\x00b":             "line breaks or control characters",
		"token\n\n\n":        "line breaks or control characters",
		"a\x7f":              "line breaks or control characters",
	} {
		s := of(map[string]string{"token": value})
		r := request(t, "https://api.example/")
		r.Header.Set("Authorization", "Bearer "+must(t)(s.Secret(id("token"))))
		_, err := s.Render(r, false)
		if err == nil || !strings.HasPrefix(err.Error(), "header Authorization: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", value, err)
		}
		if err != nil && strings.Contains(err.Error(), "Injected") {
			t.Errorf("the error quotes the value: %v", err)
		}
		if _, err = s.Render(request(t, "https://api.example/?k="+must(t)(s.Secret(id("token")))), false); err != nil {
			t.Errorf("%q in a query: %v", value, err)
		}
	}
}

func TestReferencesInOtherPlacesAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		field string
		put   func(*http.Request, string)
	}{
		"method":        {"method, host or URL", func(r *http.Request, ref string) { r.Method = ref }},
		"host":          {"method, host or URL", func(r *http.Request, ref string) { r.Host = ref + ".example" }},
		"URL host":      {"method, host or URL", func(r *http.Request, ref string) { r.URL.Host = ref }},
		"opaque":        {"method, host or URL", func(r *http.Request, ref string) { r.URL.Opaque = ref }},
		"user":          {"URL", func(r *http.Request, ref string) { r.URL.User = url.UserPassword("me", ref) }},
		"fragment":      {"method, host or URL", func(r *http.Request, ref string) { r.URL.Fragment = ref }},
		"header name":   {"name of a header", func(r *http.Request, ref string) { r.Header.Set(ref, "1") }},
		"trailer name":  {"name of a header", func(r *http.Request, ref string) { r.Trailer = http.Header{ref: nil} }},
		"half, header":  {"header X", func(r *http.Request, ref string) { r.Header.Set("X", ref[:len(ref)-1]) }},
		"half, query":   {"query", func(r *http.Request, ref string) { r.URL.RawQuery = ref[:len(ref)-1] + "&a" }},
		"half, path":    {"path", func(r *http.Request, ref string) { r.URL.Path = "/" + ref[:len(ref)-2] + "99" }},
		"target":        {"request target", func(r *http.Request, ref string) { r.RequestURI = "/" + ref[:len(ref)-1] }},
		"unknown one":   {"header X", func(r *http.Request, ref string) { r.Header.Set("X", ref[:len(ref)-2]+"63") }},
		"control bytes": {"header X", func(r *http.Request, ref string) { r.Header.Set("X", ref+"\n"+ref) }},
	} {
		t.Run(name, func(t *testing.T) {
			value := "value"
			if name == "control bytes" {
				value = "\x01"
			}
			s := of(map[string]string{"token": value})
			r := request(t, "https://api.example/")
			c.put(r, must(t)(s.Secret(id("token"))))
			if _, err := s.Render(r, false); err == nil || !strings.HasPrefix(err.Error(), c.field+": ") {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestLimitsHold(t *testing.T) {
	long := strings.Repeat("x", 64<<10)
	s := of(map[string]string{"token": "value", "long": long})
	token := must(t)(s.Secret(id("token")))
	if _, err := s.Encode(4, "text"); !errors.Is(err, secret.ErrBadArgument) || !strings.Contains(err.Error(), "encoding") {
		t.Errorf("an unknown encoding: %v", err)
	}
	if _, err := s.Encode(-1, "text"); !errors.Is(err, secret.ErrBadArgument) || !strings.Contains(err.Error(), "encoding") {
		t.Errorf("a negative encoding: %v", err)
	}
	if _, err := s.Encode(Hex, token[:length-1]); !errors.Is(err, ErrUnknown) {
		t.Errorf("half a reference: %v", err)
	}
	ref := must(t)(s.Secret(id("long")))
	if _, err := s.Encode(Base64, ref+ref+ref+ref); !errors.Is(err, ErrLimit) {
		t.Errorf("many long values: %v", err)
	}
	if _, err := s.Encode(Base64, strings.Repeat("x", MaxValue)); !errors.Is(err, ErrLimit) {
		t.Errorf("a result that is too long: %v", err)
	}
	if _, err := s.Encode(Base64, strings.Repeat("x", MaxValue+1)); !errors.Is(err, ErrLimit) {
		t.Errorf("a text that is too long: %v", err)
	}
	r := request(t, "https://api.example/")
	r.Header["X"] = []string{strings.Repeat(ref, 17)}
	if _, err := s.Render(r, false); err == nil {
		t.Error("a header of more than a megabyte was rendered")
	}
	delete(r.Header, "X")
	r.Body = io.NopCloser(strings.NewReader(strings.Repeat(ref, MaxBody/len(long)+1)))
	if _, err := s.Render(r, true); err == nil {
		t.Error("a body of too many long values was rendered")
	}
	r.Body = io.NopCloser(strings.NewReader(strings.Repeat("x", MaxBody+1)))
	if _, err := s.Render(r, true); err == nil {
		t.Error("a body that is too long was rendered")
	}
	var err error
	for n := 2; err == nil; n++ {
		if _, err = s.Encode(Hex, "a"); n > MaxReferences {
			t.Fatalf("%d references", n)
		}
	}
	if !errors.Is(err, ErrLimit) {
		t.Errorf("too many references: %v", err)
	}
	s = of(map[string]string{"long": long})
	for n := 0; ; n++ {
		if _, err := s.Encode(Hex, long); errors.Is(err, ErrLimit) {
			break
		} else if n > maxHeld/len(long) {
			t.Fatal("a set may hold any amount of values")
		}
	}
}

func TestBodiesOfPoliciesAreRendered(t *testing.T) {
	s := of(map[string]string{"token": "line\r\nbreak and more"})
	token := must(t)(s.Secret(id("token")))
	r := request(t, "https://api.example/")
	body := `{"key":"` + token + `","again":"` + token + `"}`
	r.Body = io.NopCloser(strings.NewReader(body))
	r.ContentLength = int64(len(body))
	r.Header.Set("Content-Length", "93")
	used, err := s.Render(r, true)
	if err != nil || !slices.Equal(used, []secret.ID{id("token")}) {
		t.Fatal(used, err)
	}
	got, err := io.ReadAll(r.Body)
	want := strings.ReplaceAll(body, token, "line\r\nbreak and more")
	if err != nil || string(got) != want || r.ContentLength != int64(len(want)) || r.Header.Get("Content-Length") != strconv.Itoa(len(want)) {
		t.Errorf("%q, length %d, header %s, %v", got, r.ContentLength, r.Header.Get("Content-Length"), err)
	}
	r.Body = io.NopCloser(strings.NewReader(token[:length-1]))
	if _, err := s.Render(r, true); err == nil {
		t.Error("half a reference was sent")
	}
	broken := errors.New("broken")
	r.Body = io.NopCloser(io.MultiReader(strings.NewReader("x"), errorReader{broken}))
	if _, err := s.Render(r, true); !errors.Is(err, broken) {
		t.Errorf("a body that cannot be read: %v", err)
	}
}

type errorReader struct{ error }

func (e errorReader) Read([]byte) (int, error) { return 0, e.error }

func TestUnusedSetsCostOneAllocation(t *testing.T) {
	resolve := func(secret.ID) ([]byte, error) { return nil, errNotBound }
	r := request(t, "https://api.example/path?query=1")
	r.Header.Set("Authorization", "Bearer x")
	if n := testing.AllocsPerRun(100, func() {
		s := NewSet(resolve)
		_, _ = s.Render(r, true)
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
	var none *Set
	if used, err := none.Render(r, false); used != nil || err != nil {
		t.Error("a nil set is not an empty one")
	}
}

func TestHMACIsAChain(t *testing.T) {
	s := of(map[string]string{"key": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"})
	// The example of AWS's documentation, "Deriving the signing key".
	got, err := s.HMAC(id("key"), "AWS4", [][]byte{[]byte("20120215"), []byte("us-east-1"), []byte("iam"), []byte("aws4_request")})
	if want := "f4780e2d9f65fa895f9c67b32ce1baf0b0d8a43505a000a1a9e090d414db404d"; err != nil || hex.EncodeToString(got) != want {
		t.Errorf("%x, %v", got, err)
	}
	mac := hmac.New(sha256.New, []byte("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"))
	if got, err := s.HMAC(id("key"), "", [][]byte{nil}); err != nil || string(got) != string(mac.Sum(nil)) {
		t.Errorf("%x, %v", got, err)
	}
	for _, parts := range [][][]byte{nil, make([][]byte, maxParts+1)} {
		if _, err := s.HMAC(id("key"), "", parts); !errors.Is(err, secret.ErrBadArgument) || !strings.Contains(err.Error(), "parts") {
			t.Errorf("%d parts: %v", len(parts), err)
		}
	}
	if _, err := s.HMAC(id("other"), "", [][]byte{nil}); !errors.Is(err, errNotBound) {
		t.Errorf("an unknown secret: %v", err)
	}
}

func inPEM(kind string, der []byte, err error) string {
	if err != nil {
		panic(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

func TestKeysSign(t *testing.T) {
	r, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	e, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{"none": "a password", "rsa1": inPEM("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(r), nil), "broken": inPEM("PRIVATE KEY", []byte("x"), nil)}
	for name, key := range map[string]any{"rsa": r, "ed25519": private, "ec": e, "p384": other} {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		secrets[name] = inPEM("PRIVATE KEY", der, err)
	}
	secrets["long"] = inPEM("PRIVATE KEY", make([]byte, maxKey+1), nil)
	der, err := x509.MarshalECPrivateKey(e)
	secrets["ec1"] = inPEM("EC PRIVATE KEY", der, err)
	s := of(secrets)

	data := []byte("header.claims")
	digest := sha256.Sum256(data)
	for name, verify := range map[string]func(signature []byte) bool{
		"rsa":     func(b []byte) bool { return rsa.VerifyPKCS1v15(&r.PublicKey, crypto.SHA256, digest[:], b) == nil },
		"ed25519": func(b []byte) bool { return ed25519.Verify(public, data, b) },
		"ec": func(b []byte) bool {
			return len(b) == 64 && ecdsa.Verify(&e.PublicKey, digest[:], new(big.Int).SetBytes(b[:32]), new(big.Int).SetBytes(b[32:]))
		},
		"rsa1": func(b []byte) bool { return rsa.VerifyPKCS1v15(&r.PublicKey, crypto.SHA256, digest[:], b) == nil },
		"ec1":  func(b []byte) bool { return len(b) == 64 },
		"none": nil, "broken": nil, "p384": nil, "long": nil,
	} {
		for algorithm := int32(0); algorithm <= 4; algorithm++ {
			fits := verify != nil && algorithm == map[string]int32{"rsa": RS256, "rsa1": RS256, "ed25519": EdDSA, "ec": ES256, "ec1": ES256}[name]
			signature, err := s.Sign(id(name), algorithm, data)
			switch {
			case fits && (err != nil || !verify(signature)):
				t.Errorf("%s, %d: no valid signature: %v", name, algorithm, err)
			case !fits && err == nil:
				t.Errorf("%s signs with %d", name, algorithm)
			case err != nil && strings.Contains(err.Error(), "password"):
				t.Errorf("the error quotes the secret: %v", err)
			}
		}
	}
	if _, err := s.Sign(id("long"), RS256, data); err == nil || !strings.Contains(err.Error(), "8192 bits") {
		t.Errorf("a key that is too long: %v", err)
	}
	if _, err := s.Sign(id("other"), RS256, data); !errors.Is(err, errNotBound) {
		t.Errorf("an unknown secret: %v", err)
	}
}

// FuzzRender: whatever surrounds a reference, either none is left and the value
// is where it was, or the request is refused.
func FuzzRender(f *testing.F) {
	f.Add("Bearer ", "", "value-of-8", "a/b", int32(0))
	f.Add("", "\n", "v\r\n", "%", int32(3))
	f.Fuzz(func(t *testing.T, before, after, value, text string, encoding int32) {
		if strings.Contains(before+after+value+text, lead) {
			return
		}
		s := of(map[string]string{"token": value})
		ref := must(t)(s.Secret(id("token")))
		if encoded, err := s.Encode(encoding, text+ref+after); err == nil {
			ref = encoded
		}
		e, err := s.lookup(ref)
		if err != nil {
			t.Fatal(err)
		}
		r := request(t, "https://api.example/")
		r.Header["X"] = []string{before + ref + after}
		r.URL.RawQuery = before + ref + after
		r.URL.Path = "/" + before + ref + after
		_, err = s.Render(r, false)
		if err != nil {
			return
		}
		if got := r.Header["X"][0]; got != before+e.value+after || strings.ContainsAny(e.value, "\r\n\x00") {
			t.Errorf("header %q", got)
		}
		if r.URL.Path != "/"+before+e.value+after && !e.escaped {
			t.Errorf("path %q of %q", r.URL.Path, before+e.value+after)
		}
		if strings.Contains(r.URL.RawQuery+r.URL.EscapedPath(), lead) {
			t.Errorf("a reference is left: %s %s", r.URL.RawQuery, r.URL.EscapedPath())
		}
	})
}

func BenchmarkBearer(b *testing.B) {
	s := of(map[string]string{"token": "0123456789012345678901234567890123456789"})
	r := request(b, "https://api.example/user")
	r.Header.Set("Accept", "application/json")
	r.Header.Set("User-Agent", "client/1.0")
	auth := make([]string, 1)
	b.ReportAllocs()
	for b.Loop() {
		x := NewSet(s.resolve)
		ref, err := x.Secret(id("token"))
		if err != nil {
			b.Fatal(err)
		}
		auth[0] = "Bearer " + ref
		r.Header["Authorization"] = auth
		if used, err := x.Render(r, false); err != nil || len(used) != 1 {
			b.Fatal(used, err)
		}
	}
}
