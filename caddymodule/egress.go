package caddymodule

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/doze-run/doze/api"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
)

// Egress is the configuration of the sandboxes' egress.
type Egress struct {
	// The decision on traffic that no rule of the node, the owner or the sandbox matches.
	// Owners and sandboxes have their own defaults. Default: `allow_public`.
	Default rule.Default `json:"default,omitempty"`
	// A rule of the node. Rules of the node come before those that owners and sandboxes
	// have, which cannot allow what it denies. Repeatable, in order. Default: none.
	Rules []types.Rule `json:"rules,omitempty"`
	// A list of hosts that rules of the node, of owners and of sandboxes name as
	// `preset:NAME`: names, or `*.example.com`, on the line, in the block, or both. It
	// replaces a built-in preset of that name. Repeatable with other names, before or after
	// the rules: at most 100 presets with 200 hosts each. Default: none.
	Presets map[string]Preset `json:"presets,omitempty"`
	// The addresses of a host: a name, or `*.corp` for all names below. Any kind of address,
	// also the node's own. With `ADDRESS:PORT` connections go to that port whatever port
	// they are for. Repeatable. Default: DNS.
	Resolve map[string][]string `json:"resolve,omitempty"`
	// DNS servers for the addresses of hosts, with a port unless it is 53. The second one is
	// queried only while the first does not respond, and so on. Default: the system's.
	Resolvers []string `json:"resolvers,omitempty"`
	// Files with additional certificates (PEM) that upstream servers are verified by.
	// Default: only the system's.
	UpstreamCAFiles []string `json:"upstream_ca_files,omitempty"`
	// An HTTP proxy (CONNECT) for public addresses, such as
	// `http://user:password@proxy.corp:3128`. Default: none.
	UpstreamProxy string `json:"upstream_proxy,omitempty"`
	// The treatment of TLS connections that would pass through and may hide their server's
	// name (Encrypted Client Hello; browsers always send its form): `intercept`, or `allow`
	// to let them pass with an unknown name. Default: `intercept`.
	ECH string `json:"ech,omitempty"`
	// The maximum number of connections of all sandboxes. Further ones are reset. Default:
	// `16384`.
	MaxConnections int `json:"max_connections,omitempty"`
	// The maximum number of connections of one sandbox, from its next start on. Default:
	// `1024`.
	MaxConnectionsPerSandbox int `json:"max_connections_per_sandbox,omitempty"`
	// The memory of an instance of a policy, from the node's next start on. Default:
	// `16MiB`.
	PolicyMemoryLimit int64 `json:"policy_memory_limit,omitempty"`
	// The time that a policy may compute for a request, and for a response, from the node's
	// next start on. Default: `50ms`.
	PolicyTimeLimit caddy.Duration `json:"policy_time_limit,omitempty"`
}

// Preset is a named list of hosts.
type Preset struct {
	// The purpose, which owners read in the list of presets.
	Description string `json:"description,omitempty"`
	// Names, or `*.` and a name for all below it. 1 to 200.
	Hosts []string `json:"hosts"`
}

// presets returns the operator's presets and the ones that come with doze.
func (e *Egress) presets() (*rule.Presets, error) {
	var list []preset.Preset
	for _, name := range slices.Sorted(maps.Keys(e.Presets)) {
		list = append(list, e.Presets[name].preset(name))
	}
	return rule.NewPresets(list)
}

func (p Preset) preset(name string) preset.Preset {
	return preset.Preset{Name: name, Description: p.Description, Hosts: p.Hosts}
}

// settings checks all that can be checked without the node.
func (e *Egress) settings() (egress.Settings, error) {
	if e == nil {
		return egress.DefaultSettings(), nil
	}
	presets, err := e.presets()
	if err != nil {
		return egress.Settings{}, fmt.Errorf("egress: %w", err)
	}
	s, err := e.options()
	if err != nil {
		return s, err
	}
	if s.Rules, err = e.compileRules(presets); err != nil {
		return s, fmt.Errorf("egress: %w", err)
	}
	for _, path := range e.UpstreamCAFiles {
		pem, err := os.ReadFile(path)
		if err != nil {
			return s, fmt.Errorf("egress: upstream_ca: %w", err)
		}
		s.UpstreamCAs = append(append(s.UpstreamCAs, pem...), '\n')
	}
	return s, nil
}

// options returns the settings without presets and rules and without the contents of files,
// which may be on another machine.
func (e *Egress) options() (egress.Settings, error) {
	s := egress.DefaultSettings()
	set(&s.Default, e.Default)
	switch e.ECH {
	case "", "intercept":
	case "allow":
		s.AllowECH = true
	default:
		return s, fmt.Errorf("egress: ech is %q; write intercept or allow", e.ECH)
	}
	set(&s.MaxConnections, e.MaxConnections)
	set(&s.MaxSandboxConnections, e.MaxConnectionsPerSandbox)
	set(&s.PolicyMemory, e.PolicyMemoryLimit)
	set(&s.PolicyTime, time.Duration(e.PolicyTimeLimit))
	var err error
	if s.Resolve, err = overrides(e.Resolve); err != nil {
		return s, err
	}
	if s.NameServers, err = resolvers(e.Resolvers); err != nil {
		return s, err
	}
	if s.UpstreamProxy, err = proxyURL(e.UpstreamProxy); err != nil {
		return s, err
	}
	return s, s.Validate()
}

// compileRules returns the layer of the node's rules. An error names every mistake.
func (e *Egress) compileRules(presets *rule.Presets) (*rule.Layer, error) {
	rules, err := api.RulesOf(e.Rules)
	if err != nil {
		return nil, err
	}
	return rule.Compile(rule.Node, rules, presets)
}

// overrides parses addresses with or without a port.
func overrides(resolve map[string][]string) (map[string]dial.Override, error) {
	parsed := make(map[string]dial.Override, len(resolve))
	for host, texts := range resolve {
		var o dial.Override
		for i, text := range texts {
			a, err := addrPort(text)
			if err != nil {
				return nil, fmt.Errorf("egress: resolve %s: invalid address %q; write it like 10.1.2.3 or 10.1.2.3:8443", host, text)
			}
			if i > 0 && a.Port() != o.Port {
				return nil, fmt.Errorf("egress: resolve %s: all addresses have the same port, or none", host)
			}
			o.Addrs, o.Port = append(o.Addrs, a.Addr()), a.Port()
		}
		parsed[host] = o
	}
	return parsed, nil
}

// dnsPort of name servers (RFC 1035).
const dnsPort = 53

func resolvers(texts []string) ([]netip.AddrPort, error) {
	var servers []netip.AddrPort
	for _, text := range texts {
		a, err := addrPort(text)
		if err != nil {
			return nil, fmt.Errorf("egress: resolvers: invalid address %q; write it like 10.1.2.3 or 10.1.2.3:5353", text)
		}
		if a.Port() == 0 {
			a = netip.AddrPortFrom(a.Addr(), dnsPort)
		}
		servers = append(servers, a)
	}
	return servers, nil
}

func addrPort(text string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.AddrPortFrom(a, 0), nil
	}
	return netip.ParseAddrPort(text)
}

func proxyURL(text string) (*url.URL, error) {
	if text == "" {
		return nil, nil
	}
	u, err := url.Parse(text)
	if err == nil && (u.Scheme != "http" && u.Scheme != "https" || u.Host == "") {
		err = errors.New("no host, or neither http nor https")
	}
	if err != nil {
		// The URL may hold a password, so it is not repeated.
		return nil, errors.New("egress: upstream_proxy: invalid URL; write it like http://proxy.example:3128")
	}
	return u, nil
}
