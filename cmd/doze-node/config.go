package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/spf13/pflag"

	"github.com/doze-run/doze/caddymodule"
)

// configFlags name a configuration.
type configFlags struct{ file, adapter string }

func (f *configFlags) add(flags *pflag.FlagSet) {
	flags.StringVarP(&f.file, "config", "c", "", "configuration file, or - for standard input (default $DOZE_CADDYFILE, ./Caddyfile or "+packagedCaddyfile+")")
	flags.StringVarP(&f.adapter, "adapter", "a", "", "config adapter (default caddyfile, unless the file's name ends in .json)")
}

// adapterOf is the adapter for a file: empty for JSON.
func adapterOf(file string) string {
	if filepath.Ext(file) == ".json" {
		return ""
	}
	return "caddyfile"
}

func (f *configFlags) adapterName() string { return cmp.Or(f.adapter, adapterOf(f.file)) }

// filename is the file's absolute path, to which its imports are relative.
func (f *configFlags) filename() string {
	if f.file == "-" {
		return "Caddyfile"
	}
	path, err := filepath.Abs(f.file)
	if err != nil {
		return f.file
	}
	return path
}

// read reads the file, which is the default one if none is named.
func (f *configFlags) read(a *app) ([]byte, error) {
	if f.file = cmp.Or(f.file, a.defaultCaddyfile()); f.file == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(f.file)
}

// adaptHere returns the configuration as JSON, adapted in this process's environment.
func (f *configFlags) adaptHere(text []byte) ([]byte, []caddyconfig.Warning, error) {
	if f.adapterName() == "" {
		return text, nil, nil
	}
	return caddymodule.Adapt(f.adapterName(), f.filename(), text)
}

// nodeConfig is what this program needs to know of a configuration.
type nodeConfig struct {
	Admin struct {
		Disabled bool   `json:"disabled"`
		Listen   string `json:"listen"`
	} `json:"admin"`
	Apps struct {
		Doze json.RawMessage `json:"doze"`
		HTTP struct {
			Servers map[string]struct {
				Listen []string `json:"listen"`
			} `json:"servers"`
		} `json:"http"`
	} `json:"apps"`
}

// parseConfig ignores errors: Caddy reports them.
func parseConfig(adapted []byte) *nodeConfig {
	c := new(nodeConfig)
	_ = json.Unmarshal(adapted, c)
	return c
}

// adminAddress is where the node's admin endpoint listens; empty for nowhere.
func (c *nodeConfig) adminAddress() string {
	if c.Admin.Disabled {
		return ""
	}
	return cmp.Or(c.Admin.Listen, caddy.DefaultAdminListen)
}

// admin is the admin endpoint of a running node.
type admin struct{ address string }

// errNoNode means that no process listens on the admin endpoint.
var errNoNode = errors.New("no node responds")

// findAdmin returns the admin endpoint of the node that runs with a configuration:
// at the address given, or else at the configuration's in this process's
// environment, or else in the home.
func (a *app) findAdmin(address string, f *configFlags, text []byte) (admin, error) {
	folder, err := a.setHome()
	if err != nil {
		return admin{}, err
	}
	if address == "" {
		if adapted, _, err := f.adaptHere(text); err == nil {
			address = parseConfig(adapted).adminAddress()
			if address == "" {
				return admin{}, errors.New("the configuration has `admin off`; name the node's admin endpoint by --address")
			}
		}
	}
	return admin{cmp.Or(address, "unix/"+filepath.Join(folder, "admin.sock"))}, nil
}

// maxResponse bounds a response of the admin endpoint: a configuration.
const maxResponse = 64 << 20

// request makes a request and returns the response's body. Errors: errNoNode (wrapped) if no
// process listens, or else the node's.
func (n admin) request(ctx context.Context, method, path string, header http.Header, body []byte) ([]byte, error) {
	response, err := n.open(ctx, method, path, header, body)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(io.LimitReader(response.Body, maxResponse))
}

// open is request for a body of any length, which the caller closes.
func (n admin) open(ctx context.Context, method, path string, header http.Header, body []byte) (*http.Response, error) {
	address, err := caddy.ParseNetworkAddress(n.address)
	if err != nil {
		return nil, fmt.Errorf("admin endpoint %s: %w", n.address, err)
	}
	at, host := address.JoinHostPort(0), address.JoinHostPort(0)
	if address.IsUnixNetwork() {
		at, _, _ = strings.Cut(address.Host, "|") // and the file's mode
		host = "127.0.0.1"
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://"+host+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if !address.IsUnixNetwork() { // whose clients need no origin
		request.Header.Set("Origin", "http://"+host)
	}
	request.Header.Set("Content-Type", "application/json")
	maps.Copy(request.Header, header)
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, address.Network, at)
		},
	}}
	response, err := client.Do(request)
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return nil, fmt.Errorf("%w at %s: %w", errNoNode, n.address, op)
	}
	if err != nil {
		return nil, fmt.Errorf("admin endpoint %s: %w", n.address, err)
	}
	if response.StatusCode < 400 {
		return response, nil
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxResponse))
	if err != nil {
		return nil, err
	}
	var refusal struct {
		Error string `json:"error"`
	}
	if json.Unmarshal(text, &refusal) != nil || refusal.Error == "" {
		refusal.Error = response.Status
	}
	return nil, errors.New(refusal.Error)
}

// adaptAt returns the configuration as JSON, adapted in the environment of a node. It prints
// the warnings.
func (a *app) adaptAt(ctx context.Context, node admin, f *configFlags, text []byte) ([]byte, error) {
	if f.adapterName() == "" { // nothing to adapt; is there a node?
		_, err := node.request(ctx, http.MethodGet, "/config/admin", nil, nil)
		return text, err
	}
	header := http.Header{"Content-Type": {"text/" + f.adapterName()}}
	response, err := node.request(ctx, http.MethodPost, "/doze/adapt?filename="+url.QueryEscape(f.filename()), header, text)
	if err != nil {
		return nil, err
	}
	var adapted struct {
		Result   json.RawMessage
		Warnings []caddyconfig.Warning
	}
	err = json.Unmarshal(response, &adapted)
	a.warn(adapted.Warnings)
	return adapted.Result, err
}

func (a *app) warn(warnings []caddyconfig.Warning) {
	for _, w := range warnings {
		fmt.Fprintf(a.err, "doze: %s:%d: %s\n", w.File, w.Line, w.Message)
	}
}
