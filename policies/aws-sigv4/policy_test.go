package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/policies/sdk/sdktest"
)

// The keys of AWS's examples. They are published, and open nothing.
const (
	suiteID  = "AKIDEXAMPLE"
	suiteKey = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
	s3ID     = "AKIAIOSFODNN7EXAMPLE"
	s3Key    = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
)

var (
	suiteTime = time.Date(2015, 8, 30, 12, 36, 0, 0, time.UTC)
	s3Time    = time.Date(2013, 5, 24, 0, 0, 0, 0, time.UTC)
)

// newSuite is the policy as AWS's signature test suite has it.
func newSuite(t *testing.T, service string) *sdktest.Policy {
	p := sdktest.New(t, `{"access_key_id":"`+suiteID+`","region":"us-east-1","service":"`+service+`"}`)
	p.Secrets["secret_access_key"] = suiteKey
	p.Now = suiteTime
	return p
}

func signatureOf(t *testing.T, got sdktest.Result) string {
	t.Helper()
	_, signature, ok := strings.Cut(got.Header.Get("Authorization"), "Signature=")
	if !ok {
		t.Fatalf("sent %v, denied %q", got.Header, got.Reason)
	}
	return signature
}

// Cases of AWS's published signature test suite, by their names.
func TestSignaturesOfTheTestSuite(t *testing.T) {
	for _, tt := range []struct{ name, method, path, want string }{
		{"get-vanilla", "GET", "/", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
		{"get-vanilla-query-order-key-case", "GET", "/?Param2=value2&Param1=value1", "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
		{"get-relative", "GET", "/example/..", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
		{"get-slash", "GET", "//", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
		{"post-vanilla", "POST", "/", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := newSuite(t, "service").Send(sdktest.Request(tt.method, "https://example.amazonaws.com"+tt.path, ""))
			if signature := signatureOf(t, got); signature != tt.want {
				t.Errorf("got %s", got.Header.Get("Authorization"))
			}
			if want := "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, SignedHeaders=host;x-amz-date, Signature=" + tt.want; got.Header.Get("Authorization") != want {
				t.Errorf("sent %q", got.Header.Get("Authorization"))
			}
		})
	}
}

// The example of AWS's documentation, with its intermediate results.
func TestTheDocumentedExample(t *testing.T) {
	s := signing{
		method: "GET", path: "/", query: "Action=ListUsers&Version=2010-05-08", payload: hashOf(""),
		headers: []header{
			{"content-type", "application/x-www-form-urlencoded; charset=utf-8"},
			{"host", "iam.amazonaws.com"}, {"x-amz-date", "20150830T123600Z"},
		},
		time: suiteTime, region: "us-east-1", service: "iam",
	}
	if got := hashOf(s.canonicalRequest()); got != "f536975d06c0309214f805bb90ccff089219ecd68b2577efef23edd43b7e1a59" {
		t.Errorf("the canonical request is\n%s", s.canonicalRequest())
	}
	key := []byte("AWS4" + suiteKey)
	for _, part := range []string{s.date(), s.region, s.service, "aws4_request"} {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(part))
		key = mac.Sum(nil)
	}
	if hex.EncodeToString(key) != "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9" {
		t.Errorf("the derived key is %x", key)
	}
	r := sdktest.Get("https://iam.amazonaws.com/?Action=ListUsers&Version=2010-05-08")
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")
	const want = "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
	if got := signatureOf(t, newSuite(t, "iam").Send(r)); got != want {
		t.Errorf("the signature is %s", got)
	}
}

// The examples of S3's documentation.
func TestSignaturesOfS3(t *testing.T) {
	for _, tt := range []struct{ path, want string }{
		{"/?lifecycle", "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"},
		{"/?max-keys=2&prefix=J", "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"},
	} {
		p := sdktest.New(t, `{"region":"us-east-1","service":"s3"}`)
		p.Secrets["access_key_id"], p.Secrets["secret_access_key"] = s3ID, s3Key
		p.Now = s3Time
		got := p.Send(sdktest.Get("https://examplebucket.s3.amazonaws.com" + tt.path))
		if signature := signatureOf(t, got); signature != tt.want {
			t.Errorf("%s: sent %q", tt.path, got.Header.Get("Authorization"))
		}
		if !strings.Contains(got.Header.Get("Authorization"), "Credential="+s3ID+"/20130524/us-east-1/s3/aws4_request") {
			t.Errorf("sent %q", got.Header.Get("Authorization"))
		}
	}
	// With headers that this policy leaves unsigned.
	s := signing{
		method: "PUT", path: "/test$file.text", payload: hashOf("Welcome to Amazon S3."),
		headers: []header{
			{"date", "Fri, 24 May 2013 00:00:00 GMT"}, {"host", "examplebucket.s3.amazonaws.com"}, {"x-amz-date", "20130524T000000Z"},
			{"x-amz-content-sha256", hashOf("Welcome to Amazon S3.")}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"},
		},
		time: s3Time, region: "us-east-1", service: "s3",
	}
	if got := hashOf(s.canonicalRequest()); got != "9e0e90d9c76de8fa5b200d8c849cd5b8dc7a3be3951ddb7f6a76b4158342019d" {
		t.Errorf("the canonical request is\n%s", s.canonicalRequest())
	}
}

func hashOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

func TestTheClientsOwnSignatureIsReplaced(t *testing.T) {
	clean := newSuite(t, "service").Send(sdktest.Get("https://example.amazonaws.com/?a=b"))
	r := sdktest.Get("https://example.amazonaws.com/?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=0&a=b&X-Amz-Credential=own&x-amz-%53ecurity-Token=t")
	r.Header.Set("Authorization", "AWS4-HMAC-SHA256 Credential=own")
	r.Header.Set("X-Amz-Security-Token", "own")
	r.Header.Set("X-Amz-Date", "20000101T000000Z")
	r.Header.Set("Date", "Sat, 01 Jan 2000 00:00:00 GMT")
	got := newSuite(t, "service").Send(r)
	if got.URI != "/?a=b" || got.Header.Get("Authorization") != clean.Header.Get("Authorization") {
		t.Errorf("sent %s, %v, want %v", got.URI, got.Header, clean.Header)
	}
	if got.Header.Get("X-Amz-Security-Token") != "" || got.Header.Get("Date") != "" {
		t.Errorf("sent %v", got.Header)
	}
}

func TestTheSessionTokenIsSentAndSigned(t *testing.T) {
	p := sdktest.New(t, `{"access_key_id":"a","session_token":"t0ken/+=","region":"us-east-1","service":"sts"}`)
	p.Secrets["secret_access_key"] = suiteKey
	got := p.Send(sdktest.Get("https://sts.amazonaws.com/"))
	if got.Header.Get("X-Amz-Security-Token") != "t0ken/+=" ||
		!strings.Contains(got.Header.Get("Authorization"), "SignedHeaders=host;x-amz-date;x-amz-security-token,") {
		t.Errorf("sent %v (%s)", got.Header, got.Reason)
	}
}

func TestWhatIsSignedOfTheBody(t *testing.T) {
	const s3 = `{"access_key_id":"a","region":"us-east-1","service":"s3"}`
	const lax = `{"access_key_id":"a","region":"us-east-1","service":"s3","payload":"unsigned"}`
	body := strings.Repeat("x", 100_000)
	for _, tt := range []struct{ name, config, own, want, denied string }{
		{"its hash", s3, "", hashOf(body), ""},
		{"nothing", lax, "", "UNSIGNED-PAYLOAD", ""},
		{"the client's hash", lax, hashOf("other"), hashOf("other"), ""},
		{"nothing, as the client has it", s3, "UNSIGNED-PAYLOAD", "UNSIGNED-PAYLOAD", ""},
		{"a checksum that follows", s3, "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", ""},
		{"chunks that the client signed", s3, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "", "the client's own key"},
		{"an invalid hash", s3, "x", hashOf(body), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := sdktest.New(t, tt.config)
			p.Secrets["secret_access_key"] = s3Key
			r := sdktest.Request("PUT", "https://b.s3.amazonaws.com/key", body)
			if tt.own != "" {
				r.Header.Set("X-Amz-Content-Sha256", tt.own)
			}
			got := p.Send(r)
			if got.Header.Get("X-Amz-Content-Sha256") != tt.want || !strings.Contains(got.Reason, tt.denied) || got.Denied != (tt.denied != "") {
				t.Errorf("sent %v, denied %q", got.Header, got.Reason)
			}
			if !got.Denied && got.Body != body {
				t.Errorf("%d bytes of %d arrive", len(got.Body), len(body))
			}
		})
	}
}

func TestPathsAndQueriesAreCanonicalized(t *testing.T) {
	for _, tt := range []struct{ service, path, want string }{
		{"s3", "/a%20b/c%2Fd", "/a%20b/c/d"}, {"s3", "/a//../b", "/a//../b"}, {"s3", "/a b", "/a%20b"}, {"s3", "/a+b$", "/a%2Bb%24"},
		{"x", "/a%20b", "/a%2520b"}, {"x", "/a/./b//c/", "/a/b/c/"}, {"x", "/../a", "/a"}, {"x", "/", "/"}, {"x", "", "/"},
	} {
		s := signing{service: tt.service, path: tt.path}
		if got := s.canonicalPath(); got != tt.want {
			t.Errorf("%s %q: got %q, want %q", tt.service, tt.path, got, tt.want)
		}
	}
	for query, want := range map[string]string{
		"": "", "b&a=2&a=1": "a=1&a=2&b=", "k=a%2fb+c": "k=a%2Fb%20c", "%4b=~": "K=~", "a=b=c": "a=b%3Dc", "&&a": "a=",
	} {
		if got := canonicalQuery(query); got != want {
			t.Errorf("%q: got %q, want %q", query, got, want)
		}
	}
	r := sdktest.Get("https://example.amazonaws.com/?q=a+b")
	if got := newSuite(t, "service").Send(r); got.URI != "/?q=a%20b" {
		t.Errorf("sent %s", got.URI)
	}
}

func TestSpacesInHeadersAreSignedAsOne(t *testing.T) {
	s := signing{headers: []header{{"x-amz-meta-a", "  a   b  "}, {"host", "h"}}}
	if got := s.canonicalRequest(); !strings.Contains(got, "\nhost:h\nx-amz-meta-a:a b\n\nhost;x-amz-meta-a\n") {
		t.Errorf("got\n%s", got)
	}
}

func TestAPortIsPartOfTheHost(t *testing.T) {
	r := sdktest.Get("https://minio.example.com:9000/")
	r.Host = "minio.example.com:9000"
	plain := newSuite(t, "service").Send(sdktest.Get("https://minio.example.com/"))
	if got := newSuite(t, "service").Send(r); got.Header.Get("Authorization") == plain.Header.Get("Authorization") {
		t.Error("the port is not signed")
	}
}

func TestInvalidConfigurationsAreRefused(t *testing.T) {
	for config, want := range map[string]string{
		`{"service":"s3"}`:                                         "region",
		`{"region":"eu-central-1"}`:                                "service",
		`{"region":"r","service":"S3"}`:                            "service",
		`{"region":"r","service":"s3","payload":"x"}`:              "payload",
		`{"region":"r","service":"ec2","payload":"unsigned"}`:      "s3 only",
		`{"region":"r","service":"s3","access_key_id":"a, b"}`:     "access_key_id",
		`{"region":"r","service":"s3","session_token":"a\r\nb:c"}`: "session_token",
	} {
		if _, err := sdktest.Start(config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", config, err, want)
		}
	}
}

func TestRequestsWithoutTheSecretAreDenied(t *testing.T) {
	p := newSuite(t, "service")
	p.Secrets = nil
	if got := p.Send(sdktest.Get("https://example.amazonaws.com/")); !got.Denied || got.Method != "" {
		t.Errorf("got %+v", got)
	}
}
