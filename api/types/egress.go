package types

import "time"

// Flow is a refused DNS query, a TCP connection or an HTTP request of a sandbox or of
// a client of the proxy. It is recorded when it has ended.
type Flow struct {
	Seq        uint64       `json:"seq" doc:"Number of the entry, rising within a list"`
	Time       time.Time    `json:"time" doc:"When it was recorded"`
	Sandbox    string       `json:"sandbox,omitempty" doc:"Id of the sandbox; missing for clients of the proxy"`
	Flow       string       `json:"flow,omitempty" doc:"Identifies the connection: its requests have the same"`
	Kind       FlowKind     `json:"kind" doc:"What was recorded. dns: a refused query; connection: a TCP connection; request: an HTTP request on an intercepted connection"`
	Host       string       `json:"host,omitempty" doc:"Name of the host" example:"api.github.com"`
	Address    string       `json:"address,omitempty" doc:"Address that was dialed, or that the sandbox connected to without a name"`
	Port       uint16       `json:"port,omitempty" doc:"TCP port"`
	Method     string       `json:"method,omitempty" doc:"Method of the request"`
	Path       string       `json:"path,omitempty" doc:"Path of the request, without its query"`
	Rule       string       `json:"rule,omitempty" doc:"Rule that decided, as source/name" example:"owner/github"`
	Policies   []FlowPolicy `json:"policies,omitempty" nullable:"false" doc:"Policies that ran"`
	Verdict    Verdict      `json:"verdict" enum:"allow,deny,respond,error" doc:"What happened. allow: it was sent to the host; deny: it was refused; respond: a rule or policy responded instead of the host; error: it was allowed and failed"`
	Reason     string       `json:"reason,omitempty" doc:"Why, for people"`
	Secrets    []string     `json:"secrets,omitempty" nullable:"false" doc:"Names of the secrets that were used"`
	Notes      []string     `json:"notes,omitempty" nullable:"false" doc:"Notes of policies"`
	Status     int          `json:"status,omitempty" doc:"HTTP status of the response"`
	BytesOut   int64        `json:"bytes_out,omitempty" doc:"Bytes from the sandbox"`
	BytesIn    int64        `json:"bytes_in,omitempty" doc:"Bytes to the sandbox"`
	DurationMS float64      `json:"duration_ms,omitempty" doc:"How long it took, in milliseconds"`
	Dropped    uint64       `json:"dropped,omitempty" doc:"Number of entries before this one that a stream lost because its client read too slowly"`
}

// FlowPolicy is a policy that ran.
type FlowPolicy struct {
	Name   string `json:"name" doc:"Name of the policy"`
	Digest string `json:"digest" doc:"Digest of its module, sha256:HEX"`
}

// FlowKind is what a Flow records. The server-sent event of a Flow has the same name.
type FlowKind string

const (
	FlowKindDNS        FlowKind = "dns"        // a refused query
	FlowKindConnection FlowKind = "connection" // a TCP connection
	FlowKindRequest    FlowKind = "request"    // an HTTP request on an intercepted connection
)

// Values returns all kinds.
func (FlowKind) Values() []FlowKind {
	return []FlowKind{FlowKindDNS, FlowKindConnection, FlowKindRequest}
}

// Verdict is what happens to an outgoing request.
type Verdict string

const (
	VerdictAllow   Verdict = "allow"   // it is sent to the host
	VerdictDeny    Verdict = "deny"    // it is refused
	VerdictRespond Verdict = "respond" // a rule or policy responds instead of the host
	VerdictError   Verdict = "error"   // of a Flow: it was allowed and failed
	VerdictInspect Verdict = "inspect" // of an Explanation: each request on the connection is decided on
)

// Values returns all verdicts.
func (Verdict) Values() []Verdict {
	return []Verdict{VerdictAllow, VerdictDeny, VerdictRespond, VerdictError, VerdictInspect}
}

// FlowList is a page of flows.
type FlowList struct {
	Flows      []Flow `json:"flows" nullable:"false" doc:"Flows, oldest first"`
	NextCursor string `json:"next_cursor,omitempty" doc:"Cursor of the next page; missing on the last page"`
}

// ExplainRequest describes a request, which is not sent.
type ExplainRequest struct {
	Method  string            `json:"method,omitempty" maxLength:"64" default:"GET" doc:"Method of the request"`
	URL     string            `json:"url" maxLength:"8192" doc:"https://HOST/PATH, http://HOST/PATH, or tcp://HOST:PORT for protocols other than HTTP" example:"https://api.github.com/user"`
	Headers map[string]string `json:"headers,omitempty" doc:"Headers of the request"`
}

// Explanation is what would happen to a request.
type Explanation struct {
	Verdict      Verdict           `json:"verdict" enum:"allow,deny,respond,inspect" doc:"What would happen. allow: it is sent to the host; deny: it is refused; respond: a rule responds instead of the host; inspect: each request on the connection is decided on"`
	Stage        Stage             `json:"stage" doc:"Where the decision is made"`
	Rule         string            `json:"rule" doc:"Rule that decides, as source/name; default if none does" example:"owner/github"`
	Reason       string            `json:"reason" doc:"Why, for people"`
	Preset       string            `json:"preset,omitempty" doc:"Preset by which the rule matches the host"`
	AllowPrivate bool              `json:"allow_private,omitempty" doc:"Whether the host may have private addresses"`
	Status       int               `json:"status,omitempty" doc:"HTTP status of the rule's response"`
	Policies     []ExplainedPolicy `json:"policies,omitempty" nullable:"false" doc:"Policies that run, in this order"`
	Secrets      []ExplainedSecret `json:"secrets,omitempty" nullable:"false" doc:"Secrets that the policies can use"`
	Placeholders []ExplainedSecret `json:"placeholders,omitempty" nullable:"false" doc:"Secrets that are exchanged for their placeholders, if the request has any"`
}

// Stage is where the decision on a request is made.
type Stage string

const (
	StageDNS        Stage = "dns"        // the name is refused
	StageConnection Stage = "connection" // the connection is refused, or passes through
	StageRequest    Stage = "request"    // the connection is intercepted
)

// Values returns all stages.
func (Stage) Values() []Stage { return []Stage{StageDNS, StageConnection, StageRequest} }

// ExplainedPolicy is a policy that runs.
type ExplainedPolicy struct {
	Rule   string `json:"rule" doc:"Rule that has the policy, as source/name" example:"owner/github"`
	Name   string `json:"name" doc:"Name of the policy" example:"bearer"`
	Digest string `json:"digest,omitempty" doc:"Digest of its module, sha256:HEX"`
	Error  string `json:"error,omitempty" doc:"Why the policy cannot run, so the request is refused"`
}

// ExplainedSecret is a secret that can be sent.
type ExplainedSecret struct {
	Name  string `json:"name" doc:"Name of the secret" example:"github"`
	Error string `json:"error,omitempty" doc:"Why the secret cannot be sent, so the request is refused"`
}
