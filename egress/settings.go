package egress

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"time"

	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/rule"
)

// Settings are the operator's settings. They can change while the node runs.
type Settings struct {
	// Default applies to requests and connections that no rule matches.
	Default rule.Default
	// Rules are the node's rules. The presets that they were compiled with can be named by
	// all rules. If nil, the node has no rules, and the presets are the ones that doze ships.
	Rules *rule.Layer
	// Resolve overrides DNS. Its keys are host names, or `*.` and a name.
	Resolve map[string]dial.Override
	// NameServers resolve all other hosts. If empty, the system's name servers apply.
	NameServers []netip.AddrPort
	// UpstreamCAs (PEM) are trusted in addition to the system's when servers are dialed.
	UpstreamCAs []byte
	// UpstreamProxy is an HTTP proxy through which servers are dialed, or nil.
	UpstreamProxy *url.URL
	// AllowECH passes connections through that may hide their server's name (ECH),
	// instead of intercepting them.
	AllowECH bool
	// MaxConnections bounds the connections of all sandboxes and of the proxy.
	// MaxSandboxConnections bounds the connections of one sandbox, or of one owner at the
	// proxy.
	MaxConnections, MaxSandboxConnections int
	// PolicyMemory bounds the memory of a policy instance, in bytes. PolicyTime bounds
	// its computation for one request or response. Changes apply from the next Open on.
	PolicyMemory int64
	PolicyTime   time.Duration
}

// DefaultSettings returns the settings of a node whose operator configures nothing.
func DefaultSettings() Settings {
	return Settings{
		Default:               rule.AllowPublic,
		MaxConnections:        16384,
		MaxSandboxConnections: 1024,
		PolicyMemory:          16 << 20,
		PolicyTime:            50 * time.Millisecond,
	}
}

// Validate checks the values of all fields except Rules, which rule.Compile has checked.
func (s *Settings) Validate() error {
	switch {
	case s.Default != rule.AllowPublic && s.Default != rule.DenyAll:
		return fmt.Errorf("egress: default is %q; write %s or %s", s.Default, rule.AllowPublic, rule.DenyAll)
	case s.MaxConnections < 1 || s.MaxSandboxConnections < 1:
		return errors.New("egress: limits of connections must be at least 1")
	case s.PolicyMemory < 1<<20 || s.PolicyMemory > 1<<30:
		return fmt.Errorf("egress: policy_memory_limit is %d bytes; write 1MiB to 1GiB", s.PolicyMemory)
	case s.PolicyTime < time.Millisecond || s.PolicyTime > time.Minute:
		return fmt.Errorf("egress: policy_time_limit is %v; write 1ms to 1m", s.PolicyTime)
	}
	c := dial.Config{Servers: s.NameServers, Overrides: s.Resolve, Proxy: s.UpstreamProxy}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("egress: %w", err)
	}
	return nil
}

// errNoCertificate means that an upstream_ca file contains no certificate.
var errNoCertificate = errors.New("egress: upstream_ca contains no PEM certificate")

// rootsWith returns the system's certificates and the ones in pem. It returns nil, which
// means the system's, if pem is empty.
func rootsWith(pem []byte) (*x509.CertPool, error) {
	if len(pem) == 0 {
		return nil, nil
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errNoCertificate
	}
	return roots, nil
}
