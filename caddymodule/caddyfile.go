package caddymodule

import (
	"errors"
	"strconv"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/doze-run/doze/runtime/sandbox"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("doze", parseApp)
	httpcaddyfile.RegisterHandlerDirective("doze_api", parseAPI)
	httpcaddyfile.RegisterHandlerDirective("doze_preview", parsePreview)
	httpcaddyfile.RegisterHandlerDirective("doze_proxy", parseProxy)
	// They respond themselves, as reverse_proxy does.
	httpcaddyfile.RegisterDirectiveOrder("doze_api", httpcaddyfile.Before, "reverse_proxy")
	httpcaddyfile.RegisterDirectiveOrder("doze_preview", httpcaddyfile.Before, "reverse_proxy")
	httpcaddyfile.RegisterDirectiveOrder("doze_proxy", httpcaddyfile.Before, "reverse_proxy")
}

// parseApp sets up the doze app from the global option. Syntax:
//
//	doze {
//		data                    <folder>
//		token_file              <file>
//		podman_socket           <socket>
//		guest                   <program>
//		netns_helper            <program>
//		cgroup                  <folder>
//		image                   <name> <reference>
//		allow_images            <pattern...>
//		default_image           <name|reference>
//		size                    <name> {
//			cpus                <cores>
//			memory              <size>
//			pids                <count>
//			user_namespaces     <count>
//			inotify_instances   <count>
//			inotify_watches     <count>
//			pending_signals     <count>
//			message_queue_bytes <size>
//		}
//		default_size            <name>
//		sleep_after             <duration>
//		stop_after              <duration>
//		idle_cpu                <cores>
//		wake_timeout            <duration>
//		create_timeout          <duration>
//		stop_grace_period       <duration>
//		max_sandboxes           <count>
//		max_waiters             <count>
//		max_waiters_per_sandbox <count>
//		preview_domain          <domain>
//		preview_port            <port>
//		egress {
//			...
//		}
//	}
//
// The syntax of egress is at parseEgress.
// `image`, `allow_images` and `size` may be repeated. All are documented at
// the fields of App.
func parseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // consume option name
	if existing != nil {
		return nil, d.Err("the option doze is already set; put all of it into one block")
	}
	if d.NextArg() {
		return nil, d.ArgErr()
	}
	app := new(App)
	o := options{Dispenser: d, seen: map[string]bool{}}
	for d.NextBlock(0) {
		if err := app.parseOption(o); err != nil {
			return nil, err
		}
	}
	return httpcaddyfile.App{Name: "doze", Value: caddyconfig.JSON(app, nil)}, nil
}

func (a *App) parseOption(o options) error {
	switch name := o.Val(); name {
	case "data":
		return o.text(&a.Data)
	case "token_file":
		return o.text(&a.TokenFile)
	case "podman_socket":
		return o.text(&a.PodmanSocket)
	case "guest":
		return o.text(&a.Guest)
	case "netns_helper":
		return o.text(&a.NetnsHelper)
	case "cgroup":
		return o.text(&a.Cgroup)
	case "image":
		return a.parseImage(o)
	case "allow_images":
		patterns := o.RemainingArgs()
		if len(patterns) == 0 {
			return o.ArgErr()
		}
		a.AllowImages = append(a.AllowImages, patterns...)
		return nil
	case "default_image":
		return o.text(&a.DefaultImage)
	case "size":
		return a.parseSize(o)
	case "default_size":
		return o.text(&a.DefaultSize)
	case "sleep_after":
		a.SleepAfter = new(caddy.Duration)
		return o.idleTime(a.SleepAfter)
	case "stop_after":
		a.StopAfter = new(caddy.Duration)
		return o.idleTime(a.StopAfter)
	case "idle_cpu":
		a.IdleCPU = new(float64)
		return o.cores(a.IdleCPU)
	case "wake_timeout":
		return o.positiveDuration(&a.WakeTimeout)
	case "create_timeout":
		return o.positiveDuration(&a.CreateTimeout)
	case "stop_grace_period":
		return o.positiveDuration(&a.StopGracePeriod)
	case "max_sandboxes":
		return o.count(&a.MaxSandboxes)
	case "max_waiters":
		return o.count(&a.MaxWaiters)
	case "max_waiters_per_sandbox":
		return o.count(&a.MaxWaitersPerSandbox)
	case "preview_domain":
		return o.text(&a.PreviewDomain)
	case "preview_port":
		return o.port(&a.PreviewPort)
	case "egress":
		return a.parseEgress(o)
	default:
		return o.Errf("unrecognized subdirective '%s' of doze", name)
	}
}

func (a *App) parseImage(o options) error {
	var name, ref string
	if !o.AllArgs(&name, &ref) {
		return o.ArgErr()
	}
	if _, twice := a.Images[name]; twice {
		return o.Errf("image %q is already set", name)
	}
	if a.Images == nil {
		a.Images = map[string]string{}
	}
	a.Images[name] = ref
	return nil
}

func (a *App) parseSize(o options) error {
	var name string
	if !o.AllArgs(&name) {
		return o.ArgErr()
	}
	if _, twice := a.Sizes[name]; twice {
		return o.Errf("size %q is already set", name)
	}
	if a.Sizes == nil {
		a.Sizes = map[string]*Size{}
	}
	size := new(Size)
	a.Sizes[name] = size
	inner := options{Dispenser: o.Dispenser, seen: map[string]bool{}}
	for nesting := o.Nesting(); o.NextBlock(nesting); {
		if err := size.parseOption(inner); err != nil {
			return err
		}
	}
	return nil
}

func (s *Size) parseOption(o options) error {
	switch name := o.Val(); name {
	case "cpus":
		return o.cores(&s.CPUs)
	case "memory":
		return o.bytes(&s.Memory)
	case "pids":
		return o.count64(&s.PIDs, 1)
	case "user_namespaces":
		return o.count64(&s.UserNamespaces, 0)
	case "inotify_instances":
		return o.count64(&s.InotifyInstances, 1)
	case "inotify_watches":
		return o.count64(&s.InotifyWatches, 1)
	case "pending_signals":
		return o.count64(&s.PendingSignals, 1)
	case "message_queue_bytes":
		return o.bytes(&s.MessageQueueBytes)
	default:
		return o.Errf("unrecognized subdirective '%s' of size; it has cpus, memory, pids, user_namespaces, "+
			"inotify_instances, inotify_watches, pending_signals and message_queue_bytes", name)
	}
}

// parseAPI sets up the API's handler. Syntax:
//
//	doze_api [<matcher>]
func parseAPI(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // consume directive name
	if h.NextArg() {
		return nil, h.ArgErr()
	}
	if h.NextBlock(0) {
		return nil, h.Errf("unrecognized subdirective '%s'; doze_api has none", h.Val())
	}
	return new(API), nil
}

// parseProxy sets up the proxy's handler. Syntax:
//
//	doze_proxy [<matcher>]
//
// Requests to a proxy name other hosts, so that the site needs an address without a
// host in addition to the one of its certificate:
//
//	:3128, proxy.example.com:3128 {
//		doze_proxy
//	}
func parseProxy(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // consume directive name
	if h.NextArg() {
		return nil, h.ArgErr()
	}
	if h.NextBlock(0) {
		return nil, h.Errf("unrecognized subdirective '%s'; doze_proxy has none", h.Val())
	}
	return new(Proxy), nil
}

// parsePreview sets up the handler of previews. Syntax:
//
//	doze_preview [<matcher>] [<domain...>] {
//		domain                   <domain...>
//		wait_timeout             <duration>
//		waiting_page_after       <duration>
//		max_requests             <count>
//		max_requests_per_sandbox <count>
//	}
//
// Domains may be given on the line, in the block, or both.
func parsePreview(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // consume directive name
	p := &Preview{Domains: h.RemainingArgs()}
	o := options{Dispenser: h.Dispenser, seen: map[string]bool{}}
	for h.NextBlock(0) {
		if err := p.parseOption(o); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *Preview) parseOption(o options) error {
	switch name := o.Val(); name {
	case "domain":
		domains := o.RemainingArgs()
		if len(domains) == 0 {
			return o.ArgErr()
		}
		p.Domains = append(p.Domains, domains...)
		return nil
	case "wait_timeout":
		return o.positiveDuration(&p.WaitTimeout)
	case "waiting_page_after":
		return o.positiveDuration(&p.WaitingPageAfter)
	case "max_requests":
		return o.count(&p.MaxRequests)
	case "max_requests_per_sandbox":
		return o.count(&p.MaxRequestsPerSandbox)
	default:
		return o.Errf("unrecognized subdirective '%s' of doze_preview", name)
	}
}

// UnmarshalCaddyfile sets up the permission. Syntax:
//
//	permission doze [<domain...>]
func (p *Permission) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume module name
	p.Domains = d.RemainingArgs()
	if d.NextBlock(0) {
		return d.Errf("unrecognized subdirective '%s'; permission doze has none", d.Val())
	}
	return nil
}

// options reads options that have one value and stand at most once in a block.
type options struct {
	*caddyfile.Dispenser
	seen map[string]bool
}

func (o options) text(to *string) error {
	name := o.Val()
	if o.seen[name] {
		return o.Errf("%s is already set", name)
	}
	o.seen[name] = true
	if !o.AllArgs(to) {
		return o.ArgErr()
	}
	if *to == "" {
		return o.Errf("%s is empty; leave it out for its default", name)
	}
	return nil
}

func (o options) duration(to *caddy.Duration) error {
	name, text := o.Val(), ""
	if err := o.text(&text); err != nil {
		return err
	}
	d, err := caddy.ParseDuration(text)
	if err != nil || d < 0 {
		return o.Errf(`%s is %q; write it like "60s", "5m" or "24h"`, name, text)
	}
	*to = caddy.Duration(d)
	return nil
}

// idleTime is for sleep_after and stop_after. Their range is package sandbox's.
func (o options) idleTime(to *caddy.Duration) error {
	name := o.Val()
	if err := o.duration(to); err != nil {
		return err
	}
	cfg := sandbox.DefaultConfig()
	cfg.SleepAfter = time.Duration(*to)
	var invalid *sandbox.InvalidError
	if errors.As(cfg.Validate(), &invalid) {
		return o.Errf("%s: %s; %s", name, invalid.Reason, invalid.Want)
	}
	return nil
}

// positiveDuration is for what has no "never".
func (o options) positiveDuration(to *caddy.Duration) error {
	name := o.Val()
	if err := o.duration(to); err != nil {
		return err
	}
	if *to == 0 {
		return o.Errf("%s is 0; leave it out for its default", name)
	}
	return nil
}

func (o options) count(to *int) error {
	var n int64
	if err := o.count64(&n, 1); err != nil {
		return err
	}
	*to = int(n)
	return nil
}

func (o options) count64(to *int64, least int64) error {
	name, text := o.Val(), ""
	if err := o.text(&text); err != nil {
		return err
	}
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil || n < least {
		return o.Errf("%s is %q; it is a whole number from %d", name, text, least)
	}
	*to = n
	return nil
}

func (o options) port(to *int) error {
	name := o.Val()
	if err := o.count(to); err != nil {
		return err
	}
	if *to > 65535 {
		return o.Errf("%s is %d; a port is 1 to 65535", name, *to)
	}
	return nil
}

func (o options) cores(to *float64) error {
	name, text := o.Val(), ""
	if err := o.text(&text); err != nil {
		return err
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n > 0 && n <= 4096) { // also refuses NaN
		return o.Errf("%s is %q; it is a number of CPU cores, such as 0.25", name, text)
	}
	*to = n
	return nil
}

func (o options) bytes(to *int64) error {
	name, text := o.Val(), ""
	if err := o.text(&text); err != nil {
		return err
	}
	n, err := humanize.ParseBytes(text)
	if err != nil || n == 0 || n > 1<<50 {
		return o.Errf(`%s is %q; write it like "256MiB" or "4GiB"`, name, text)
	}
	*to = int64(n)
	return nil
}

// Interface guards
var _ caddyfile.Unmarshaler = (*Permission)(nil)
