package sdk

import (
	"time"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
	"github.com/doze-run/doze/policies/sdk/internal/decode"
)

// Sandbox is the sandbox that sends the request.
type Sandbox struct {
	ID     string            `json:"id"`
	Name   string            `json:"name"`
	Owner  string            `json:"owner"`
	Labels map[string]string `json:"labels"`
}

// The result of the last call of CurrentSandbox, as JSON and decoded. The next result is mostly
// the same.
var (
	sandboxJSON string
	sandbox     Sandbox
)

// CurrentSandbox returns the sandbox that sends the request. Its Labels must not be changed.
func CurrentSandbox() (Sandbox, error) {
	raw, err := fetchOf("sandbox", "", abi.Node().Sandbox)
	if err != nil {
		return Sandbox{}, err
	}
	if string(raw) != sandboxJSON {
		var s Sandbox
		if err := decode.Lenient(raw, &s); err != nil {
			return Sandbox{}, err
		}
		sandboxJSON, sandbox = string(raw), s
	}
	return sandbox, nil
}

// Host returns the name of the host to which the request goes, in lower case and without
// the port.
func Host() (string, error) {
	name, err := fetchOf("host", "", abi.Node().HostName)
	return string(name), err
}

// Note adds a note to the audit log entry of this exchange: at most 8, of 256 bytes each.
func Note(text string) { abi.Node().AuditNote(text) }

// Log writes a line to the node's log.
func Log(text string) { abi.Node().Log(abi.Info, text) }

// Now returns the node's time.
func Now() time.Time { return time.Unix(0, abi.Node().Now()) }
