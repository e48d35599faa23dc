package caddymodule

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
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
	httpcaddyfile.RegisterHandlerDirective("doze_api", withoutOptions(new(API)))
	httpcaddyfile.RegisterHandlerDirective("doze_preview", parsePreview)
	httpcaddyfile.RegisterHandlerDirective("doze_proxy", withoutOptions(new(Proxy)))
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
//		disk_helper             <program>
//		backup_helper           <program>
//		bucket_helper           <program>
//		cgroup                  <folder>
//		image                   <name> <reference>
//		allow_images            <pattern...>
//		default_image           <name|reference>
//		size                    <name> {
//			cpus                <cores>
//			memory              <size>
//			pids                <count>
//			disk                <size>
//			files               <count>
//			user_namespaces     <count>
//			inotify_instances   <count>
//			inotify_watches     <count>
//			pending_signals     <count>
//			message_queue_bytes <size>
//		}
//		default_size            <name>
//		sleep_after             <duration>
//		stop_after              <duration>
//		archive_after           <duration>
//		idle_cpu                <cores>
//		reclaim_after           <duration>
//		memory_reserve          <percentage>
//		memory_stall            <percentage>
//		disk_reserve            <size>
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
//		backups {
//			endpoint            <url>
//			bucket              <name>
//			prefix              <prefix>
//			region              <region>
//			access_key          <key>
//			secret_key          <secret>
//			password            <password>
//		}
//		bucket                  <name> {
//			endpoint            <url>
//			bucket              <name>
//			prefix              <prefix>
//			region              <region>
//			access_key          <key>
//			secret_key          <secret>
//			read_only
//		}
//	}
//
// The syntax of egress is at parseEgress.
// `image`, `allow_images`, `size` and `bucket` may be repeated. All are documented at
// the fields of App.
func parseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // consume option name
	if existing != nil {
		return nil, d.Err("the option doze is already set; put all of it into one block")
	}
	if d.NextArg() {
		return nil, d.ArgErr()
	}
	a := new(App)
	err := readBlock(d, "doze", map[string]any{
		"data":                    &a.Data,
		"token_file":              &a.TokenFile,
		"podman_socket":           &a.PodmanSocket,
		"guest":                   &a.Guest,
		"netns_helper":            &a.NetnsHelper,
		"disk_helper":             &a.DiskHelper,
		"backup_helper":           &a.BackupHelper,
		"bucket_helper":           &a.BucketHelper,
		"cgroup":                  &a.Cgroup,
		"image":                   a.parseImage,
		"allow_images":            &a.AllowImages,
		"default_image":           &a.DefaultImage,
		"size":                    a.parseSize,
		"default_size":            &a.DefaultSize,
		"sleep_after":             &a.SleepAfter,
		"stop_after":              &a.StopAfter,
		"archive_after":           &a.ArchiveAfter,
		"idle_cpu":                &a.IdleCPU,
		"reclaim_after":           &a.ReclaimAfter,
		"memory_reserve":          share{&a.MemoryReserve},
		"memory_stall":            share{&a.MemoryStall},
		"disk_reserve":            &a.DiskReserve,
		"wake_timeout":            &a.WakeTimeout,
		"create_timeout":          &a.CreateTimeout,
		"stop_grace_period":       &a.StopGracePeriod,
		"max_sandboxes":           &a.MaxSandboxes,
		"max_waiters":             &a.MaxWaiters,
		"max_waiters_per_sandbox": &a.MaxWaitersPerSandbox,
		"preview_domain":          &a.PreviewDomain,
		"preview_port":            a.parsePreviewPort,
		"egress":                  a.parseEgress,
		"backups":                 a.parseBackups,
		"bucket":                  a.parseBucket,
	})
	if err != nil {
		return nil, err
	}
	if err := a.checkArchiveAfter(); err != nil {
		return nil, d.WrapErr(err)
	}
	return httpcaddyfile.App{Name: "doze", Value: caddyconfig.JSON(a, nil)}, nil
}

func (a *App) parseImage(o options) error {
	var name, ref string
	if !o.AllArgs(&name, &ref) {
		return o.ArgErr()
	}
	return setOnce(o.Dispenser, &a.Images, fmt.Sprintf("image %q", name), name, ref)
}

func (a *App) parseSize(o options) error {
	var name string
	if !o.AllArgs(&name) {
		return o.ArgErr()
	}
	size := new(Size)
	if err := setOnce(o.Dispenser, &a.Sizes, fmt.Sprintf("size %q", name), name, size); err != nil {
		return err
	}
	return readBlock(o.Dispenser, "size", map[string]any{
		"cpus":                &size.CPUs,
		"memory":              &size.Memory,
		"pids":                atLeast{&size.PIDs, 1},
		"disk":                &size.Disk,
		"files":               atLeast{&size.Files, 1},
		"user_namespaces":     atLeast{&size.UserNamespaces, 0},
		"inotify_instances":   atLeast{&size.InotifyInstances, 1},
		"inotify_watches":     atLeast{&size.InotifyWatches, 1},
		"pending_signals":     atLeast{&size.PendingSignals, 1},
		"message_queue_bytes": &size.MessageQueueBytes,
	})
}

func (a *App) parsePreviewPort(o options) error {
	if err := o.count(&a.PreviewPort); err != nil {
		return err
	}
	if a.PreviewPort > 65535 {
		return o.Errf("preview_port is %d; a port is 1 to 65535", a.PreviewPort)
	}
	return nil
}

// withoutOptions parses a directive that has neither arguments nor a block. Syntax:
//
//	doze_api   [<matcher>]
//	doze_proxy [<matcher>]
//
// Requests to doze_proxy name other hosts, so that the site needs an address without a
// host in addition to the one of its certificate:
//
//	:3128, proxy.example.com:3128 {
//		doze_proxy
//	}
func withoutOptions(handler caddyhttp.MiddlewareHandler) httpcaddyfile.UnmarshalHandlerFunc {
	return func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next() // consume directive name
		name := h.Val()
		if h.NextArg() {
			return nil, h.ArgErr()
		}
		if h.NextBlock(0) {
			return nil, h.Errf("unrecognized subdirective '%s'; %s has none", h.Val(), name)
		}
		return handler, nil
	}
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
	return p, readBlock(h.Dispenser, "doze_preview", map[string]any{
		"domain":                   &p.Domains,
		"wait_timeout":             &p.WaitTimeout,
		"waiting_page_after":       &p.WaitingPageAfter,
		"max_requests":             &p.MaxRequests,
		"max_requests_per_sandbox": &p.MaxRequestsPerSandbox,
	})
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

// options reads options of a block.
type options struct {
	*caddyfile.Dispenser
	seen map[string]bool // those with one value, which stand at most once
}

// atLeast is a field of a whole number that is not a number of bytes.
type atLeast struct {
	field *int64
	least int64
}

// share is a field of a share, which is written as a percentage.
type share struct{ field **float64 }

// secret is a field of a text that errors do not repeat.
type secret struct{ field *string }

// readBlock reads the options of a block. It has for each the field, whose type decides what
// the option accepts, or a function that reads it.
func readBlock(d *caddyfile.Dispenser, block string, fields map[string]any) error {
	o := options{Dispenser: d, seen: map[string]bool{}}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if err := o.read(block, fields); err != nil {
			return err
		}
	}
	return nil
}

// read reads one option of a block.
func (o options) read(block string, fields map[string]any) error {
	switch to := fields[o.Val()].(type) {
	case func(options) error:
		return to(o)
	case *string:
		return o.text(to)
	case secret:
		return o.secret(to.field)
	case *[]string:
		return o.list(to)
	case *map[string]string:
		return o.pair(to)
	case *bool:
		*to = true
		return o.nothing()
	case *int:
		return o.count(to)
	case atLeast:
		return o.count64(to.field, to.least)
	case *int64:
		return o.bytes(to)
	case *float64:
		return o.cores(to)
	case **float64:
		*to = new(float64)
		return o.cores(*to)
	case share:
		*to.field = new(float64)
		return o.percentage(*to.field)
	case *caddy.Duration:
		return o.positiveDuration(to)
	case **caddy.Duration:
		*to = new(caddy.Duration)
		return o.idleTime(*to)
	}
	known := strings.Join(slices.Sorted(maps.Keys(fields)), ", ")
	return o.Errf("unrecognized subdirective '%s' of %s; it has %s", o.Val(), block, known)
}

func (o options) nothing() error {
	if o.NextArg() {
		return o.ArgErr()
	}
	return nil
}

// pair reads a name and a value into a map.
func (o options) pair(to *map[string]string) error {
	option := o.Val()
	var name, value string
	if !o.AllArgs(&name, &value) {
		return o.ArgErr()
	}
	return setOnce(o.Dispenser, to, option+" "+name, name, value)
}

// setOnce adds an entry to a map. The error for a second one names it by its label.
func setOnce[V any](d *caddyfile.Dispenser, to *map[string]V, label, key string, value V) error {
	if _, twice := (*to)[key]; twice {
		return d.Errf("%s is already set", label)
	}
	if *to == nil {
		*to = map[string]V{}
	}
	(*to)[key] = value
	return nil
}

// list reads one value or more of an option that may be repeated.
func (o options) list(to *[]string) error {
	values := o.RemainingArgs()
	if len(values) == 0 {
		return o.ArgErr()
	}
	*to = append(*to, values...)
	return nil
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

func (o options) secret(to *string) error {
	name := o.Val()
	if o.CountRemainingArgs() != 1 {
		return o.Errf("wrong argument count or unexpected line ending after '%s'", name)
	}
	return o.text(to)
}

// value reads an option's value, which valid converts. want describes valid values.
func value[T any](o options, to *T, want string, valid func(text string) (T, bool)) error {
	name, text := o.Val(), ""
	if err := o.text(&text); err != nil {
		return err
	}
	v, ok := valid(text)
	if !ok {
		return o.Errf("%s is %q; %s", name, text, want)
	}
	*to = v
	return nil
}

func (o options) duration(to *caddy.Duration) error {
	return value(o, to, `write it like "60s", "5m" or "24h"`, func(text string) (caddy.Duration, bool) {
		d, err := caddy.ParseDuration(text)
		return caddy.Duration(d), err == nil && d >= 0
	})
}

// idleTime is for sleep_after, stop_after, archive_after and reclaim_after. Their range is package sandbox's.
func (o options) idleTime(to *caddy.Duration) error {
	name := o.Val()
	if err := o.duration(to); err != nil {
		return err
	}
	cfg := sandbox.DefaultConfig()
	cfg.SleepAfter = time.Duration(*to)
	if invalid, ok := errors.AsType[*sandbox.InvalidError](cfg.Validate()); ok {
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
	err := o.count64(&n, 1)
	*to = int(n)
	return err
}

func (o options) count64(to *int64, least int64) error {
	return value(o, to, fmt.Sprintf("it is a whole number from %d", least), func(text string) (int64, bool) {
		n, err := strconv.ParseInt(text, 10, 32)
		return n, err == nil && n >= least
	})
}

func (o options) cores(to *float64) error {
	return value(o, to, "it is a number of CPU cores, such as 0.25", func(text string) (float64, bool) {
		n, err := strconv.ParseFloat(text, 64)
		return n, err == nil && n > 0 && n <= 4096
	})
}

func (o options) percentage(to *float64) error {
	return value(o, to, "it is a percentage from 0% to below 100%, such as 5%", func(text string) (float64, bool) {
		number, ok := strings.CutSuffix(text, "%")
		n, err := strconv.ParseFloat(number, 64)
		return n / 100, ok && err == nil && n >= 0 && n < 100
	})
}

func (o options) bytes(to *int64) error {
	return value(o, to, `write it like "256MiB" or "4GiB"`, func(text string) (int64, bool) {
		n, err := humanize.ParseBytes(text)
		return int64(n), err == nil && n > 0 && n <= 1<<50
	})
}

// Interface guards
var _ caddyfile.Unmarshaler = (*Permission)(nil)
