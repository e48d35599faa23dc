package caddymodule

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/logging"
	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"

	"github.com/doze-run/doze/redact"
)

func init() {
	caddy.RegisterModule(new(LogEncoder))
}

// LogEncoder is a log format that leaves out what gives access: the tokens in the host
// names of previews, API keys, the queries of URLs, and the headers of requests and
// responses, Referer and cookies included. All else is up to the format that it wraps.
type LogEncoder struct {
	// The format of what remains. Default: `console` if the log goes to a terminal,
	// else `json`.
	WrappedRaw json.RawMessage `json:"wrap,omitempty" caddy:"namespace=caddy.logging.encoders inline_key=format"`

	redactor  // of wrapped
	wrapped   zapcore.Encoder
	isDefault bool
	ctx       caddy.Context
}

// CaddyModule returns the Caddy module information.
func (*LogEncoder) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.logging.encoders.doze", New: func() caddy.Module { return new(LogEncoder) }}
}

// Provision sets up the wrapped format.
func (e *LogEncoder) Provision(ctx caddy.Context) error {
	e.ctx = ctx
	if e.isDefault = e.WrappedRaw == nil; e.isDefault {
		return e.provision(new(logging.JSONEncoder))
	}
	module, err := ctx.LoadModule(e, "WrappedRaw")
	if err != nil {
		return fmt.Errorf("load the wrapped log format: %w", err)
	}
	e.wrap(module.(zapcore.Encoder))
	return nil
}

func (e *LogEncoder) provision(format interface {
	zapcore.Encoder
	caddy.Provisioner
}) error {
	if err := format.Provision(e.ctx); err != nil {
		return fmt.Errorf("provision the default log format: %w", err)
	}
	e.wrap(format)
	return nil
}

func (e *LogEncoder) wrap(format zapcore.Encoder) { e.wrapped, e.redactor = format, redactor{format} }

// ConfigureDefaultFormat chooses the console format for a terminal.
func (e *LogEncoder) ConfigureDefaultFormat(wo caddy.WriterOpener) error {
	if e.isDefault && caddy.IsWriterStandardStream(wo) && term.IsTerminal(int(os.Stderr.Fd())) {
		return e.provision(new(logging.ConsoleEncoder))
	}
	if format, ok := e.wrapped.(caddy.ConfiguresFormatterDefault); ok {
		return format.ConfigureDefaultFormat(wo)
	}
	return nil
}

// UnmarshalCaddyfile sets up the format. Syntax:
//
//	doze {
//		wrap <another format>
//	}
func (e *LogEncoder) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if d.NextArg() {
		return d.ArgErr()
	}
	for d.NextBlock(0) {
		if d.Val() != "wrap" {
			return d.Errf("unrecognized subdirective '%s'", d.Val())
		}
		if !d.NextArg() {
			return d.ArgErr()
		}
		name := d.Val()
		module, err := caddyfile.UnmarshalModule(d, "caddy.logging.encoders."+name)
		if err != nil {
			return err
		}
		format, ok := module.(zapcore.Encoder)
		if !ok {
			return d.Errf("%s is not a log format", name)
		}
		e.WrappedRaw = caddyconfig.JSONModuleObject(format, "format", name, nil)
	}
	return nil
}

// Clone implements zapcore.Encoder.
func (e *LogEncoder) Clone() zapcore.Encoder {
	c := new(LogEncoder)
	c.wrap(e.wrapped.Clone())
	return c
}

// EncodeEntry implements zapcore.Encoder.
func (e *LogEncoder) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	entry.Message = redact.Text(entry.Message)
	all := e.wrapped.Clone()
	for _, f := range fields {
		f.AddTo(redactor{all})
	}
	return all.EncodeEntry(entry, nil)
}

// formatProbe counts the logs that are not redacted: each log's encoder calls it with
// itself when a logger gets it as a field, and nothing is written.
type formatProbe struct{ plain int }

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (p *formatProbe) MarshalLogObject(encoder zapcore.ObjectEncoder) error {
	if _, ok := encoder.(redactor); !ok {
		p.plain++
	}
	return nil
}

// warnOfPlainLogs warns of logs without the format doze. The node keeps what gives
// access out of every log that it can, but the rest of Caddy does not: it logs the names
// of certificates that are obtained on demand, and at level DEBUG whole requests.
func warnOfPlainLogs(log *zap.Logger) {
	probe := new(formatProbe)
	log.With(zap.Object("probe", probe))
	if probe.plain > 0 {
		log.Warn("log format without redaction configured", zap.Int("logs", probe.plain), zap.String("remedy", "add `format doze` to each `log`"))
	}
}

// redactor passes fields on, redacted.
type redactor struct{ zapcore.ObjectEncoder }

// omitted are fields that Caddy's objects for requests and responses have.
func omitted(key string) bool { return key == "headers" || key == "resp_headers" }

// AddString implements zapcore.ObjectEncoder.
func (r redactor) AddString(key, value string) {
	if key == "uri" {
		value, _, _ = strings.Cut(value, "?")
	}
	r.ObjectEncoder.AddString(key, redact.Text(value))
}

// AddByteString implements zapcore.ObjectEncoder.
func (r redactor) AddByteString(key string, value []byte) {
	r.AddString(key, string(value))
}

// AddObject implements zapcore.ObjectEncoder.
func (r redactor) AddObject(key string, object zapcore.ObjectMarshaler) error {
	if omitted(key) {
		return nil
	}
	return r.ObjectEncoder.AddObject(key, redactedObject{object})
}

// AddArray implements zapcore.ObjectEncoder.
func (r redactor) AddArray(key string, array zapcore.ArrayMarshaler) error {
	return r.ObjectEncoder.AddArray(key, redactedArray{array})
}

// AddReflected implements zapcore.ObjectEncoder.
func (r redactor) AddReflected(key string, value any) error {
	if omitted(key) {
		return nil
	}
	redacted, err := reflected(value)
	if err != nil {
		return err
	}
	return r.ObjectEncoder.AddReflected(key, redacted)
}

// reflected returns the JSON of a value, redacted. URLs lose their queries.
func reflected(value any) (json.RawMessage, error) {
	if u, ok := value.(*url.URL); ok && u != nil {
		value = u.Scheme + "://" + u.Host + u.EscapedPath()
	}
	text, err := json.Marshal(value)
	return json.RawMessage(redact.Text(string(text))), err
}

type redactedObject struct{ zapcore.ObjectMarshaler }

func (o redactedObject) MarshalLogObject(to zapcore.ObjectEncoder) error {
	return o.ObjectMarshaler.MarshalLogObject(redactor{to})
}

type redactedArray struct{ zapcore.ArrayMarshaler }

func (a redactedArray) MarshalLogArray(to zapcore.ArrayEncoder) error {
	return a.ArrayMarshaler.MarshalLogArray(arrayRedactor{to})
}

type arrayRedactor struct{ zapcore.ArrayEncoder }

func (r arrayRedactor) AppendString(value string) { r.ArrayEncoder.AppendString(redact.Text(value)) }

func (r arrayRedactor) AppendByteString(value []byte) { r.AppendString(string(value)) }

func (r arrayRedactor) AppendObject(object zapcore.ObjectMarshaler) error {
	return r.ArrayEncoder.AppendObject(redactedObject{object})
}

func (r arrayRedactor) AppendArray(array zapcore.ArrayMarshaler) error {
	return r.ArrayEncoder.AppendArray(redactedArray{array})
}

func (r arrayRedactor) AppendReflected(value any) error {
	redacted, err := reflected(value)
	if err != nil {
		return err
	}
	return r.ArrayEncoder.AppendReflected(redacted)
}

// Interface guards
var (
	_ caddy.Provisioner                = (*LogEncoder)(nil)
	_ caddy.ConfiguresFormatterDefault = (*LogEncoder)(nil)
	_ caddyfile.Unmarshaler            = (*LogEncoder)(nil)
	_ zapcore.Encoder                  = (*LogEncoder)(nil)
)
