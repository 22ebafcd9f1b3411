package bpe

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/kvlane/kvlane/internal/lab/cpu"
)

// benchSize is the length of a prompt in characters.
const benchSize = 8000

// benchOrder are the kinds of text in the order of the output.
var benchOrder = strings.Fields("en code zh json ru ar hi ko th ja emoji b64 minjs logs latex")

// benchKinds returns prompts of benchSize characters of each kind: English and code from the Go
// distribution, the others made from words of those and of lists.
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
	english := read("testdata/Isaac.Newton-Opticks.txt")
	texts := scriptTexts(300_000)
	texts["en"], texts["code"], texts["zh"], texts["json"] = english, code, chinese(200_000), jsonText(code, 700_000)
	maps.Copy(texts, machineTexts(code, english, 300_000))
	kinds := map[string][]string{}
	for kind, text := range texts {
		kinds[kind] = prompts(text)
	}
	return kinds
}

// scriptWords are frequent words, stems and endings of scripts other than Latin. Words are joined
// by the separator, and a stem takes an ending where there are any.
var scriptWords = map[string]struct{ separator, stop, stems, endings string }{
	"ru":    {" ", ". ", "врем человек работ жизн город книг вод земл стран мир рук слов стол дом письм вопрос друг школ машин дорог наук язык правил систем решени результат сообщени настройк пользовател страниц файл данн изменени значени пол имен", "а у ы е ов ам ами ах ой ом и ость ный ная ного ться ли"},
	"ar":    {" ", ". ", "كتاب مدرسة بيت ماء سماء طريق مدينة رجل امرأة ولد بنت عمل يوم ليلة شمس قمر نجم بحر جبل شجرة علم لغة سؤال جواب صديق حرب سلام تاريخ اقتصاد مجتمع حكومة شركة برنامج بيانات مستخدم رسالة كَتَبَ مُعَلِّم دِرَاسَة تَعْلِيم جَدِيد", ""},
	"hi":    {" ", "। ", "समय आदमी काम जीवन शहर किताब पानी भूमि देश दुनिया हाथ शब्द मेज़ घर पत्र प्रश्न मित्र विद्यालय गाड़ी सड़क विज्ञान भाषा नियम प्रणाली निर्णय परिणाम संदेश उपयोगकर्ता पृष्ठ फ़ाइल परिवर्तन मूल्य नाम और है में की के को से पर नहीं लिए यह वह जो कि ज़रूरत पढ़ना बड़ा", ""},
	"ko":    {" ", ". ", "시간 사람 일 생활 도시 책 물 땅 나라 세계 손 말 책상 집 편지 질문 친구 학교 자동차 길 과학 언어 규칙 체계 결정 결과 메시지 설정 사용자 페이지 파일 자료 변경 값 이름 하늘 바다 산 나무 역사 경제 사회 정부 회사", "은 는 이 가 을 를 에 에서 으로 의 도 만 입니다 했습니다 하고 들이"},
	"th":    {"", " ", "เวลา คน งาน ชีวิต เมือง หนังสือ น้ำ ที่ดิน ประเทศ โลก มือ คำ โต๊ะ บ้าน จดหมาย คำถาม เพื่อน โรงเรียน รถยนต์ ถนน วิทยาศาสตร์ ภาษา กฎ ระบบ ตัดสินใจ ผลลัพธ์ ข้อความ ตั้งค่า ผู้ใช้ หน้า ไฟล์ ข้อมูล เปลี่ยนแปลง ค่า ชื่อ และ หรือ ไม่ ได้ ให้ ที่ ของ เป็น มี จะ", ""},
	"ja":    {"", "。", "時間 人 仕事 生活 都市 本 水 土地 国 世界 手 言葉 机 家 手紙 質問 友達 学校 車 道 科学 言語 規則 システム 決定 結果 メッセージ 設定 ユーザー ページ ファイル データ 変更 値 名前 コンピュータ プログラム 新しい 大きい 小さい 美しい 読む 書く 話す 聞く 歩く", "は が を に で と の も から まで です ます ました という について、 として、"},
	"emoji": {" ", "! ", "😀 😂 🤣 😍 🙏 👍🏽 🔥 🎉 ❤️ 💯 😭 🤔 👀 ✨ 🚀 💪🏼 🙌 😅 👨‍👩‍👧‍👦 🇩🇪 🇯🇵 ☀️ 🌧️ 🍕 ⚽ 🏆 📈 💻 🐛 ✅ ❌ ⚠️ thanks great ok love it see you so happy wow", "😀 😀😀 ❤️ 👍🏽 🔥🔥 lol yes"},
}

// scriptTexts returns random sentences of about n bytes for each script.
func scriptTexts(n int) map[string]string {
	texts := map[string]string{}
	for kind, s := range scriptWords {
		r := rand.New(rand.NewPCG(3, 5))
		stems, endings := strings.Fields(s.stems), append(strings.Fields(s.endings), "")
		var b strings.Builder
		for b.Len() < n {
			for k := 3 + r.IntN(9); k > 0; k-- {
				b.WriteString(stems[r.IntN(len(stems))] + endings[r.IntN(len(endings))] + s.separator)
			}
			b.WriteString(strings.TrimSuffix(s.stop, " ") + []string{" ", " ", "\n"}[r.IntN(3)])
		}
		texts[kind] = b.String()
	}
	return texts
}

// machineTexts returns texts of about n bytes that programs write and read.
func machineTexts(code, english string, n int) map[string]string {
	names := strings.FieldsFunc(code, func(r rune) bool { return !unicode.IsLetter(r) })
	prose := strings.Fields(english)
	r := rand.New(rand.NewPCG(3, 6))
	name := func() string { return names[r.IntN(len(names))] }
	phrase := func() string { i := r.IntN(len(prose) - 20); return strings.Join(prose[i:i+3+r.IntN(17)], " ") }
	var b64, js, logs, latex strings.Builder
	for raw := make([]byte, 300); b64.Len() < n; b64.WriteByte('\n') {
		for i := range raw {
			raw[i] = byte(r.Uint32())
		}
		b64.WriteString(base64.StdEncoding.EncodeToString(raw))
	}
	for js.Len() < n {
		a := func() string { return string(rune('a' + r.IntN(26))) }
		fmt.Fprintf(&js, `function %s(%s,%s){if(%s.%s===%d)return %s.%s(%s)||"%s";for(var %s=0;%s<%s.length;%s++)this.%s[%s]=!%s&&new %s({%s:%s,%s:null})}`,
			a(), a(), a(), a(), name(), r.IntN(1000), a(), name(), a(), name(), a(), a(), a(), a(), name(), a(), a(), name(), name(), a(), name())
	}
	for logs.Len() < n {
		fmt.Fprintf(&logs, "2026-11-%02dT%02d:%02d:%02d.%03dZ %s [worker-%d] %s: request %08x took %dms status=%d path=/%s/%s\n", 1+r.IntN(30), r.IntN(24), r.IntN(60), r.IntN(60), r.IntN(1000),
			[]string{"INFO", "WARN", "ERROR"}[r.IntN(3)], r.IntN(16), name(), r.Uint32(), r.IntN(5000), []int{200, 404, 500}[r.IntN(3)], name(), name())
	}
	for latex.Len() < n {
		fmt.Fprintf(&latex, "%s where $\\%s_{%d} = \\frac{%s}{\\sqrt{%s^{%d}}}$, see~\\cite{%s%d}.\n\\begin{equation}\n  \\sum_{i=1}^{n} %s_i \\leq \\left( %s \\right)\n\\end{equation}\n", phrase(),
			[]string{"alpha", "beta", "lambda", "theta"}[r.IntN(4)], r.IntN(10), name(), string(rune('a'+r.IntN(26))), r.IntN(9), name(), 1990+r.IntN(40), string(rune('a'+r.IntN(26))), name())
	}
	return map[string]string{"b64": b64.String(), "minjs": js.String(), "logs": logs.String(), "latex": latex.String()}
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

// BenchmarkEncode measures each family and kind of text, and small SentencePiece and Unigram models on English: cold empties all caches before each pass
// over the prompts, words keeps only the word caches, as for known words in a new order, and warm
// keeps everything. KVLANE_BENCH_TEXTS is a folder of KIND.json, a list of prompts each, that are
// measured in place of the built-in ones; those that are missing are written, so that another
// library can be measured on the same texts, and MODEL.KIND.ids with the SHA-256 of the ids of each prompt.
func BenchmarkEncode(b *testing.B) {
	kinds := benchKinds(b)
	if dir := os.Getenv("KVLANE_BENCH_TEXTS"); dir != "" {
		for kind, prompts := range kinds {
			path := filepath.Join(dir, kind+".json")
			text, err := os.ReadFile(path)
			if err == nil {
				prompts = nil
				err = json.Unmarshal(text, &prompts)
				kinds[kind] = prompts
			} else if text, err = json.Marshal(prompts); err == nil {
				err = os.WriteFile(path, text, 0o600)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	const foreign = "../bpe/testdata/foreign/"
	for _, name := range slices.Concat(families, []string{foreign + "spm_bpe", foreign + "spm_unigram", foreign + "unigram"}) {
		tok, order := family(b, name), benchOrder
		if strings.HasPrefix(name, foreign) { // trained on a few texts
			name, order = filepath.Base(name), []string{"en"}
		}
		for _, kind := range order {
			total := 0
			for _, p := range kinds[kind] {
				total += len(p)
			}
			if dir := os.Getenv("KVLANE_BENCH_TEXTS"); dir != "" {
				if err := os.WriteFile(filepath.Join(dir, name+"."+kind+".ids"), idSums(b, tok, kinds[kind]), 0o600); err != nil {
					b.Fatal(err)
				}
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

// idSums returns a line for each prompt, the SHA-256 of its ids in four bytes each, little endian.
func idSums(b *testing.B, tok *Tokenizer, prompts []string) []byte {
	b.Helper()
	var lines []byte
	for _, p := range prompts {
		ids, err := tok.Encode(nil, p, false)
		if err != nil {
			b.Fatal(err)
		}
		raw := []byte{}
		for _, id := range ids {
			raw = binary.LittleEndian.AppendUint32(raw, id)
		}
		lines = fmt.Appendf(lines, "%x\n", sha256.Sum256(raw))
	}
	return lines
}

func benchEncode(b *testing.B, tok *Tokenizer, prompts []string, state string) {
	b.Helper()
	var dst []uint32
	w := newEncoder(tok)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	best := make([]time.Duration, len(prompts))
	pass := func() {
		for i, p := range prompts {
			start := cpu.Thread()
			err := tok.checkText(p)
			if err == nil {
				dst, err = w.encode(dst[:0], p, 0)
			}
			if err != nil {
				b.Fatal(err)
			}
			best[i] = min(best[i], cpu.Thread()-start)
		}
	}
	if state != "cold" {
		pass()
		pass()
	}
	for i := range best {
		best[i] = time.Hour
	}
	b.ReportAllocs()
	for b.Loop() {
		if state != "warm" {
			b.StopTimer()
			if state == "cold" {
				w.reset()
			}
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
	clear(enc.front[:])
	clear(enc.broad[:])
	clear(enc.long.slots)
}

// reset empties the cache.
func (m *memo) reset() {
	for i := range m.shards {
		s := &m.shards[i]
		s.mu.Lock()
		if s.store != nil {
			clear(s.store.slots)
			s.store.textEnd, s.store.idsEnd = 0, 0
		}
		if s.once != nil {
			clear(s.once[:])
		}
		s.mu.Unlock()
	}
}
