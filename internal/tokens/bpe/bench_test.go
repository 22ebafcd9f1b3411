package bpe

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// benchSize is the length of a prompt in characters.
const benchSize = 8000

// benchKinds are the kinds of text, each with prompts of benchSize characters:
// English and code from the Go distribution, Chinese and JSON made from a list
// of words.
func benchKinds(b *testing.B) map[string][]string {
	b.Helper()
	root, err := exec.CommandContext(b.Context(), "go", "env", "GOROOT").Output()
	if err != nil {
		b.Fatal(err)
	}
	src := filepath.Join(strings.TrimSpace(string(root)), "src")
	read := func(pattern string) string {
		names, err := filepath.Glob(filepath.Join(src, pattern))
		if err != nil || len(names) == 0 {
			b.Skipf("no %s in the Go distribution", pattern)
		}
		var all strings.Builder
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				b.Fatal(err)
			}
			all.WriteString(strings.ToValidUTF8(string(text), ""))
		}
		return all.String()
	}
	code := read("net/http/*.go")
	return map[string][]string{
		"en":   prompts(read("testdata/Isaac.Newton-Opticks.txt")),
		"code": prompts(code),
		"zh":   prompts(chinese(200_000)),
		"json": prompts(jsonText(code, 700_000)),
	}
}

// chinese returns random sentences of n characters.
func chinese(n int) string {
	words := strings.Fields("我们 他 她 的 了 是 在 有 不 这 那 一个 中国 今天 明天 时候 问题 可以 没有 自己 知道 如果 因为 所以 但是 " +
		"学习 工作 经济 发展 社会 技术 人工智能 模型 数据 计算 机器 语言 文化 历史 城市 农村 春天 河水 山上 老人 孩子 朋友 老师 学生 " +
		"图书馆 飞机 火车 道路 慢慢 地 走 过 来 去 看 见 听 说 想 写 读 买 卖 吃 喝 睡 起 红 绿 蓝 黑 白 大 小 多 少 长 短 高 低 新 旧 好 坏 " +
		"非常 十分 终于 忽然 已经 曾经 正在 将要 或者 以及 对于 关于 按照 根据 通过 需要 应该 必须 能够 愿意 希望 觉得 认为 发现 研究 " +
		"镜头 光线 颜色 折射 玻璃 棱镜 实验 观察 证明 定理 几何 天空 星星 月亮 太阳 影子 窗户 房间 桌子 椅子 蜡烛 火焰 温度 压力 速度")
	r := rand.New(rand.NewPCG(3, 3))
	var b strings.Builder
	for chars := 0; chars < n; {
		for k := 4 + r.IntN(9); k > 0; k-- {
			w := words[r.IntN(len(words))]
			b.WriteString(w)
			chars += utf8.RuneCountInString(w)
		}
		b.WriteString([]string{"，", "，", "。", "；", "。\n"}[r.IntN(5)])
		chars++
	}
	return b.String()
}

// jsonText returns about n bytes of compact and indented objects with the words of a text.
func jsonText(source string, n int) string {
	words := strings.FieldsFunc(source, func(r rune) bool { return !unicode.IsLetter(r) })
	r := rand.New(rand.NewPCG(3, 4))
	word := func() string { return words[r.IntN(len(words))] }
	var b strings.Builder
	for b.Len() < n {
		if r.IntN(2) == 0 {
			fmt.Fprintf(&b, `{"%s":"%s %s","%s":[%d,%d],"%s":{"%s":%t}}`+"\n", word(), word(), word(), word(), r.IntN(100), r.IntN(1e6), word(), word(), r.IntN(2) == 0)
			continue
		}
		fmt.Fprintf(&b, "{\n  \"%s\": \"%s\",\n  \"%s\": [\n    \"%s %s\",\n    %d\n  ],\n  \"path\": \"/%s/%s\"\n},\n", word(), word(), word(), word(), word(), r.IntN(1e4), word(), word())
	}
	return b.String()
}

// prompts cuts a text into prompts of benchSize characters.
func prompts(s string) []string {
	var out []string
	for utf8.RuneCountInString(s) > benchSize/2 {
		end, n := len(s), 0
		for i := range s {
			if n == benchSize {
				end = i
				break
			}
			n++
		}
		out = append(out, s[:end])
		s = s[end:]
	}
	return out
}

// BenchmarkEncode measures each family and kind of text: cold empties all caches before each pass
// over the prompts, words keeps only the word caches, and warm keeps everything.
func BenchmarkEncode(b *testing.B) {
	kinds := benchKinds(b)
	if dir := os.Getenv("KVLANE_BENCH_TEXTS"); dir != "" { // so that another library can be measured on the same texts
		for kind, prompts := range kinds {
			text, err := json.Marshal(prompts)
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, kind+".json"), text, 0o600)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	for _, name := range families {
		tok := family(b, name)
		for _, kind := range []string{"en", "code", "zh", "json"} {
			total := 0
			for _, p := range kinds[kind] {
				total += len(p)
			}
			for _, state := range []string{"cold", "words", "warm"} {
				b.Run(fmt.Sprintf("%s/%s/%s", name, kind, state), func(b *testing.B) {
					benchEncode(b, tok, kinds[kind], state)
					b.SetBytes(int64(total))
				})
			}
		}
	}
}

func benchEncode(b *testing.B, tok *Tokenizer, prompts []string, state string) {
	b.Helper()
	var dst []uint32
	w := newEncoder(tok)
	cuts := tok.cuts
	if state == "words" {
		tok.cuts = nil
	}
	defer func() { tok.cuts = cuts }()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	best := make([]time.Duration, len(prompts))
	for i := range best {
		best[i] = time.Hour
	}
	pass := func() {
		for i, p := range prompts {
			start := cpuTime()
			err := checkText(p)
			if err == nil {
				dst, err = w.encode(dst[:0], p, 0)
			}
			if err != nil {
				b.Fatal(err)
			}
			best[i] = min(best[i], cpuTime()-start)
		}
	}
	if state != "cold" {
		pass()
		pass()
	}
	b.ReportAllocs()
	for b.Loop() {
		if state == "cold" {
			b.StopTimer()
			w.reset()
			tok.memo.reset()
			b.StartTimer()
		}
		pass()
	}
	// On a busy machine the minimum CPU time per prompt is more reliable than the mean wall time.
	bytes, sum := 0, time.Duration(0)
	for i, p := range prompts {
		bytes += len(p)
		sum += best[i]
	}
	b.ReportMetric(float64(bytes)/1e6/sum.Seconds(), "MB/cpu-s")
}

// cpuTime returns the CPU time of this thread.
func cpuTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// BenchmarkLoad measures loading a tokenizer.
func BenchmarkLoad(b *testing.B) {
	for _, name := range families {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Load(os.DirFS(filepath.Join("..", "models", name))); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// reset empties the caches.
func (enc *encoder) reset() {
	clear(enc.tiny[:])
	clear(enc.hot)
	clear(enc.long.slots)
}

// reset empties the cache.
func (m *memo) reset() {
	for i := range m.shards {
		s := &m.shards[i]
		s.mu.Lock()
		if s.store != nil {
			clear(s.store.slots)
		}
		if s.once != nil {
			clear(s.once[:])
		}
		s.mu.Unlock()
	}
}
