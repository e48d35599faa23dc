package api

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Duration is written in seconds, such as "60s", and read in any form that
// time.ParseDuration knows, such as "1h30m".
type Duration time.Duration

// MarshalText writes seconds.
func (d Duration) MarshalText() ([]byte, error) {
	return []byte(strconv.FormatFloat(time.Duration(d).Seconds(), 'f', -1, 64) + "s"), nil
}

// UnmarshalText reads what time.ParseDuration does, but nothing negative.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil || v < 0 {
		return fmt.Errorf(`invalid duration %q; write it like "60s", "5m" or "1h30m"`, clip(string(text)))
	}
	*d = Duration(v)
	return nil
}

// Schema implements huma.SchemaProvider.
func (Duration) Schema(huma.Registry) *huma.Schema {
	most := 64
	return &huma.Schema{
		Type:               huma.TypeString,
		Pattern:            `^(0|([0-9]+(\.[0-9]+)?(ms|s|m|h))+)$`,
		PatternDescription: `a duration such as "60s", "5m" or "1h30m"`,
		MaxLength:          &most,
		Examples:           []any{"60s"},
	}
}

// Sandbox is a sandbox as the API shows it.
type Sandbox struct {
	ID           sandbox.ID        `json:"id" doc:"12 characters, never changes"`
	Name         string            `json:"name" doc:"Unique per owner; also the sandbox's host name"`
	Owner        string            `json:"owner"`
	Image        string            `json:"image" doc:"As asked for"`
	ImageRef     string            `json:"image_ref" doc:"What the image's name stands for"`
	Size         string            `json:"size"`
	State        sandbox.State     `json:"state" enum:"starting,running,asleep,stopped,destroyed"`
	StateSince   time.Time         `json:"state_since"`
	StateReason  string            `json:"state_reason,omitempty" enum:"idle,stop_after,requested,forced,ttl_expired,node_shutdown,recovered,container_exited,container_lost,guest_unresponsive,recovery_failed,stop_failed,create_failed,adopted" doc:"Why it is in that state; absent after a wake"`
	Env          map[string]string `json:"env,omitempty" doc:"Its environment; not in lists"`
	Labels       map[string]string `json:"labels"`
	SleepAfter   Duration          `json:"sleep_after" doc:"Idle for so long, it sleeps; 0s means never by itself"`
	StopAfter    Duration          `json:"stop_after" doc:"Asleep for so long, it is stopped; 0s means never by itself"`
	TTL          Duration          `json:"ttl" doc:"How long it lives from its creation or from the last change of ttl; 0s means without a limit"`
	ExpiresAt    time.Time         `json:"expires_at,omitzero" doc:"When it is destroyed with its files; missing without a ttl"`
	CreatedAt    time.Time         `json:"created_at"`
	LastActiveAt time.Time         `json:"last_active_at" doc:"When somebody last used it"`
	HoldUntil    time.Time         `json:"hold_until,omitzero" doc:"It does not sleep by itself before"`
	Ports        []Port            `json:"ports" nullable:"false"`
	Processes    []guest.Process   `json:"processes,omitempty" nullable:"false" doc:"As last known; not in lists"`

	Usage *Usage `json:"usage,omitempty" doc:"Of the machine; in lists only with usage=true"`

	Condition *Condition `json:"condition,omitempty" doc:"What is wrong with it, such as why its last wake failed; absent when nothing is"`
}

// Condition is what is wrong with a sandbox.
type Condition struct {
	Code    string    `json:"code" enum:"wake_failed,sleep_failed,stop_failed,destroy_failed,recovery_failed,disk_lost,stop_incomplete,network_lost,trust_failed,unresponsive" doc:"For programs"`
	Message string    `json:"message" doc:"For people"`
	Since   time.Time `json:"since" doc:"When a condition of this code began"`
}

// Usage is what a sandbox uses of the machine.
type Usage struct {
	CPUSeconds  float64 `json:"cpu_seconds" doc:"CPU time of all its processes since the machine booted; it can restart at 0"`
	MemoryBytes int64   `json:"memory_bytes" doc:"What it holds, asleep too; 0 when stopped. Where the node has no memory controller: the sum of its processes' resident memory"`
}

// Port is an exposed port as the API shows it. Its token is in the URL.
type Port struct {
	Port      uint16                `json:"port"`
	URL       string                `json:"url"`
	Access    sandbox.Access        `json:"access" enum:"token,public"`
	Wake      sandbox.WakeMode      `json:"wake" enum:"any,navigation,never"`
	Host      sandbox.HostMode      `json:"host" enum:"auto,rewrite,preserve"`
	Protocol  sandbox.Protocol      `json:"protocol" enum:"auto,http1,h2c"`
	WebSocket sandbox.WebSocketMode `json:"websocket" enum:"sleep,keep_awake"`
	CreatedAt time.Time             `json:"created_at"`
}

// sandboxView shows a sandbox whole, to whoever asked for this one.
func (a *API) sandboxView(sb sandbox.Sandbox) Sandbox {
	v := a.sandboxSummary(sb)
	v.Env = sb.Env
	v.Processes = sb.Processes
	return v
}

// sandboxSummary is an entry of a list. It has no environment: values there are
// often secrets, and lists are what ends up in logs, dashboards and screen
// shares. Whoever may see a single sandbox may run `env` in it anyway.
func (a *API) sandboxSummary(sb sandbox.Sandbox) Sandbox {
	labels := sb.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	return Sandbox{
		ID:           sb.ID,
		Name:         sb.Name,
		Owner:        sb.Owner,
		Image:        sb.Image,
		ImageRef:     sb.ImageRef,
		Size:         sb.Size,
		State:        sb.State,
		StateSince:   sb.StateSince,
		StateReason:  string(sb.StateReason),
		Labels:       labels,
		SleepAfter:   Duration(sb.SleepAfter),
		StopAfter:    Duration(sb.StopAfter),
		TTL:          Duration(sb.TTL),
		ExpiresAt:    sb.ExpiresAt,
		CreatedAt:    sb.CreatedAt,
		LastActiveAt: sb.LastActiveAt,
		HoldUntil:    sb.HoldUntil,
		Ports:        a.portViews(sb),
		Condition:    conditionView(sb.Condition),
	}
}

func conditionView(c sandbox.Condition) *Condition {
	if c.Code == "" {
		return nil
	}
	return &Condition{Code: string(c.Code), Message: c.Message, Since: c.Since}
}

func (a *API) portViews(sb sandbox.Sandbox) []Port {
	views := make([]Port, len(sb.Ports))
	for i, p := range sb.Ports {
		views[i] = a.portView(sb, p)
	}
	return views
}

func (a *API) portView(sb sandbox.Sandbox, p sandbox.Port) Port {
	return Port{
		Port:      p.Port,
		URL:       a.previewURL(sb, p),
		Access:    p.Access,
		Wake:      p.Wake,
		Host:      p.Host,
		Protocol:  cmp.Or(p.Protocol, sandbox.ProtocolAuto),
		WebSocket: p.WebSocket,
		CreatedAt: p.CreatedAt,
	}
}
