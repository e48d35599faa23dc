package api

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// sandboxOf converts a sandbox with all its fields except Usage.
func (a *API) sandboxOf(sb sandbox.Sandbox) types.Sandbox {
	converted := a.sandboxSummary(sb)
	converted.Env = sb.Environment()
	converted.Processes = listOf(sb.Processes, processOf)
	return converted
}

// sandboxSummary converts a sandbox for lists, without its processes and its
// environment: values there are often secrets, and lists end up in logs, dashboards
// and screen shares.
func (a *API) sandboxSummary(sb sandbox.Sandbox) types.Sandbox {
	labels := sb.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	return types.Sandbox{
		ID:           string(sb.ID),
		Name:         sb.Name,
		Owner:        sb.Owner,
		Image:        sb.Image,
		ImageRef:     sb.ImageRef,
		Snapshot:     string(sb.Snapshot),
		Size:         sb.Size,
		State:        types.State(sb.State),
		StateSince:   sb.StateSince,
		StateReason:  types.StateReason(sb.StateReason),
		Labels:       labels,
		SleepAfter:   types.Duration(sb.SleepAfter),
		StopAfter:    types.Duration(sb.StopAfter),
		ArchiveAfter: types.Duration(sb.ArchiveAfter),
		Archived:     archivedDiskOf(sb.Archived),
		Persist:      types.Persist(sb.Persist),
		TTL:          types.Duration(sb.TTL),
		ExpiresAt:    sb.ExpiresAt,
		CreatedAt:    sb.CreatedAt,
		LastActiveAt: sb.LastActiveAt,
		HoldUntil:    sb.HoldUntil,
		Ports:        a.portsOf(sb),
		Condition:    conditionOf(sb.Condition),
	}
}

// archivedDiskOf returns nil for nil.
func archivedDiskOf(b *sandbox.Backup) *types.ArchivedDisk {
	if b == nil {
		return nil
	}
	return &types.ArchivedDisk{BackupID: string(b.ID), SizeBytes: b.Usage.Bytes}
}

// conditionOf returns nil if nothing is wrong.
func conditionOf(c sandbox.Condition) *types.Condition {
	if c.Code == "" {
		return nil
	}
	return &types.Condition{Code: types.ConditionCode(c.Code), Message: c.Message, Since: c.Since}
}

func (a *API) portsOf(sb sandbox.Sandbox) []types.Port {
	return listOf(sb.Ports, func(p sandbox.Port) types.Port { return a.portOf(sb, p) })
}

func (a *API) portOf(sb sandbox.Sandbox, p sandbox.Port) types.Port {
	return types.Port{
		Port:       p.Port,
		URL:        a.cfg.PreviewURL(sb, p),
		Access:     types.Access(p.Access),
		Wake:       types.WakeMode(p.Wake),
		HostHeader: types.HostHeader(p.Host),
		Protocol:   types.Protocol(cmp.Or(p.Protocol, sandbox.ProtocolAuto)),
		WebSocket:  types.WebSocketMode(p.WebSocket),
		CreatedAt:  p.CreatedAt,
	}
}

// listeningOf returns nil for nil.
func listeningOf(l *guest.Listening) *types.ListeningPort {
	if l == nil {
		return nil
	}
	return &types.ListeningPort{Port: l.Port, Addresses: slices.Concat([]string{}, l.Addresses), PID: l.PID, Program: l.Program, Process: l.Process}
}

func processOf(p guest.Process) types.Process {
	converted := types.Process{
		ID:           p.ID,
		PID:          p.PID,
		Name:         p.Name,
		Command:      p.Command,
		Argv:         p.Argv,
		Cwd:          p.Cwd,
		Restart:      types.Restart(p.Restart),
		State:        types.ProcessState(p.State),
		ExitCode:     p.ExitCode,
		Signal:       p.Signal,
		RestartCount: p.RestartCount,
		StartedAt:    p.StartedAt,
		LogFile:      p.LogFile,
	}
	if p.ExitedAt != nil {
		converted.ExitedAt = *p.ExitedAt
	}
	return converted
}

func eventOf(e sandbox.Event) types.Event {
	converted := types.Event{
		Seq:        e.Seq,
		Type:       types.EventType(e.Type),
		Time:       e.Time,
		Sandbox:    string(e.Sandbox),
		Kind:       types.WakeKind(e.Kind),
		DurationMS: e.DurationMS,
		Cause:      types.Cause(e.Cause),
		Reason:     types.StateReason(e.Reason),
		Error:      e.Error,
		Detail:     e.Detail,
		Port:       e.Port,
		Listening:  listeningOf(e.Listening),
		Progress:   e.Progress,
		Until:      e.Until,
		Snapshot:   string(e.Snapshot),
		Bytes:      e.Bytes,
		Forks:      e.Forks,

		Backup:      string(e.Backup),
		StoredBytes: e.Stored,

		Bucket: e.Bucket,
		Path:   e.Path,

		Disk:      diskUsageOf(e.Disk),
		DiskLimit: diskUsageOf(e.DiskLimit),

		MemoryBefore: e.MemoryBefore,
		MemoryAfter:  e.MemoryAfter,
	}
	if e.Process != nil {
		process := processOf(*e.Process)
		converted.Process = &process
	}
	return converted
}

// diskUsageOf returns nil for zero.
func diskUsageOf(u sandbox.DiskUsage) *types.DiskUsage {
	if u == (sandbox.DiskUsage{}) {
		return nil
	}
	return &types.DiskUsage{Bytes: u.Bytes, Files: u.Entries}
}

func feedEventOf(e sandbox.FeedEvent) types.FeedEvent {
	return types.FeedEvent{Event: eventOf(e.Event), SandboxName: e.Name, Cursor: e.Cursor}
}

// listOf converts each element. It never returns nil, which would be null in JSON.
func listOf[T, U any](list []T, convert func(T) U) []U {
	converted := make([]U, len(list))
	for i, element := range list {
		converted[i] = convert(element)
	}
	return converted
}

// milliseconds returns d in milliseconds, rounded to microseconds.
func milliseconds(d time.Duration) float64 {
	return math.Round(float64(d)/float64(time.Microsecond)) / 1000
}
