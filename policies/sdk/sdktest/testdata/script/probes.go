//go:build !wasip1

package script

import (
	_ "embed"
	"encoding/json"
)

// Probe is a test of a host: a script, and the outcome of a request. Tests run all probes on
// the node's host, as WebAssembly, and natively on package sdktest, so that the two
// cannot differ.
type Probe struct {
	Name   string   `json:"name"`
	Body   string   `json:"body"` // of the request
	Script []string `json:"script"`
	// Want is the outcome of the request: allow, respond, deny, error, or invalid
	// for an instance that does not start.
	Want   string   `json:"want"`
	Reason string   `json:"reason"` // of a denial
	Notes  []string `json:"notes"`
	// Sent is the "METHOD URI" and SentBody the body of the request that is sent.
	Sent     string `json:"sent"`
	SentBody string `json:"sent_body"`
	// Got is the status and body of the response, such as "200 ok".
	Got string `json:"got"`
	// Headers are headers of the request that is sent, and GotHeaders headers of the
	// response; "" means that the header is absent.
	Headers    map[string]string `json:"headers"`
	GotHeaders map[string]string `json:"got_headers"`
}

// The upstream of all probes responds 200 with this body and header.
const (
	UpstreamBody   = "from upstream"
	UpstreamHeader = "X-Upstream"
	URL            = "https://api.example.com/path?query=1"
)

// Secrets are the secrets of all probes, by name.
var Secrets = map[string]string{"token": "s3cret/value", "line": "two\nlines"}

//go:embed probes.json
var probes []byte

// Probes returns all probes. They abbreviate texts as scripts do.
func Probes() (all []Probe) {
	if err := json.Unmarshal(probes, &all); err != nil {
		panic(err)
	}
	for i := range all {
		p := &all[i]
		p.Body, p.SentBody, p.Reason = Repeat(p.Body), Repeat(p.SentBody), Repeat(p.Reason)
		for n := range p.Notes {
			p.Notes[n] = Repeat(p.Notes[n])
		}
	}
	return all
}
